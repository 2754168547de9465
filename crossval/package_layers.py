"""Layers of packages that `bitnet-ref crossval linear` cannot build by their class alone: functions that return them.

packages.py runs these in the interpreter that has the package. Each function has a layer's usual arguments.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"}
del sys.path[0]  # this folder: some of its files have the names of packages

import torch  # noqa: E402


def without_init(*names):
    """Packages whose __init__ imports what their BitLinear does not need, and what is not there."""
    site = Path(torch.__file__).parent.parent
    places = [*map(Path, sys.path), site]
    for name in names:
        folder = next(path for place in places if (path := place / name.replace(".", "/")).is_dir())
        sys.modules[name] = module = type(sys)(name)
        module.__path__ = [str(folder)]


def of_bitnet(in_features, out_features, bias=False):
    without_init("bitnet", "zeta", "zeta.nn", "zeta.nn.modules")
    from bitnet.bitlinear import BitLinear

    return BitLinear(in_features, out_features, bias=bias)


def of_mybitnet(in_features, out_features, bias=False, name="BitLinear"):
    without_init("mybitnet", "mybitnet.bitnet")
    from mybitnet.bitnet import bitnet

    return getattr(bitnet, name)(in_features, out_features, bias=bias)


def of_mybitnet_158b(in_features, out_features, bias=False):
    return of_mybitnet(in_features, out_features, bias, "BitLinear158b")


class OnProcessor(torch.Tensor):
    is_cuda = True  # the kernels' driver asserts it; Triton's interpreter takes any tensor


def of_onebitllms(in_features, out_features):
    from onebitllms.kernels import activation_quant, weight_quant
    from onebitllms.layers import bitnet

    def quantize_weight(w):
        return weight_quant.weight_quant_triton(w.detach().as_subclass(OnProcessor)).as_subclass(torch.Tensor)

    bitnet.weight_quant_triton = quantize_weight
    bitnet.activation_quant_triton = lambda x: activation_quant.activation_quant_triton(x.detach())
    torch.cuda.device = lambda device: nullcontext()
    return bitnet.BitNetLinear(in_features, out_features)


class OfBitmat(torch.nn.Module):
    """What bitmat's BitLinear computes in training behind its norm, whose kernel needs a GPU."""

    def __init__(self, in_features, out_features, bias=False):
        without_init("bitmat", "bitmat.utils", "bitmat.triton_kernels")
        from bitmat.utils.bitmat import bitmat, terniarize

        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(out_features, in_features))
        self.bitmat, self.terniarize = bitmat, terniarize

    def forward(self, x):
        return self.bitmat(self.weight, x, None)

    def pack(self):
        """As eval() and train() of bitmat's layer: `terniarize`, then `unpacked / scale_w`."""
        w_t, scale = self.terniarize(self.weight.data)
        self.weight.data = w_t.float() / scale


def planes(w):
    scale = w.abs().mean().clamp(min=1e-5)
    return (w / scale).round().clamp(-1, 1), scale


class OfTransformers(torch.nn.Module):
    """A class of transformers that takes quantised weights, with masters to quantise for it."""

    def __init__(self, in_features, out_features, offline):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(out_features, in_features), requires_grad=False)
        self.offline, self.shape = offline, (in_features, out_features)

    def forward(self, x):
        from transformers.integrations import bitnet

        w_t, scale = planes(self.weight)
        if self.offline:
            layer = bitnet.AutoBitLinear(*self.shape, bias=False)
            layer.weight.data, layer.weight_scale = w_t, scale
            layer.weight.requires_grad_(False)
        else:
            layer = bitnet.BitLinear(*self.shape, bias=False, dtype=x.dtype)
            layer.weight, layer.weight_scale = bitnet.pack_weights(w_t), (1 / scale).view(1)
        return layer(x)


def of_transformers_offline(in_features, out_features):
    return OfTransformers(in_features, out_features, True)


def of_transformers_packed(in_features, out_features):
    return OfTransformers(in_features, out_features, False)
