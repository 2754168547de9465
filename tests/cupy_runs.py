"""A model on a CuPy backend with options of its own."""

from __future__ import annotations

from helpers import GOLDEN

import bitnet_ref
from bitnet_ref.backends.cuda.backend import CupyBackend

CASE = GOLDEN / "bitnet-packed-offline"


def top(n, k=1):
    """The k largest logits of each of n tokens, for `Model.run`."""
    return [(k, ())] * n


def kernels_asked_for(monkeypatch, device):
    """-> the names of all kernels that the device is asked for from now on"""
    names, kernel = [], device.kernel

    def asked(file, name):
        names.append(name)
        return kernel(file, name)

    monkeypatch.setattr(device, "kernel", asked)
    return names


def load(case=CASE, **options):
    """A model on a backend with options of its own."""
    dtype = options.pop("dtype", "float32")
    subject = CupyBackend(dtype, **options)
    plain = bitnet_ref.load(case, backend="numpy")
    layers = tuple(
        type(layer)(**{**vars(layer), **{name: subject.prepare(w) for name, w in layer.linears()}})
        for layer in plain.weights.layers
    )
    weights = subject.prepare_model(type(plain.weights)(**{**vars(plain.weights), "layers": layers}), plain.config)
    return bitnet_ref.Model(plain.config, weights, subject, case)
