"""Python packages that claim b1.58, as they install: which lines of their BitLinear are wrong, and how.

    python crossval/packages.py [--write] bitnet=PYTHON bitlinear=PYTHON onebitllms=PYTHON transformers=PYTHON

Each package runs in the interpreter that is named, which needs torch and the package only. Every line (activations,
weights, output, gradients) is compared with what the reference computes from the package's own result of the line
before, so that one wrong line is not seen again in the next. `--write` puts the table into docs/cases/packages.md.
onebitllms has kernels for a GPU; Triton's interpreter runs them on the processor.
"""

import io
import os
import subprocess
import sys
from pathlib import Path

os.environ |= {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"}
del sys.path[0]  # this folder: some of its files have the names of packages

import numpy as np  # noqa: E402

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cases" / "packages.md"
LINES = ("activations", "weights", "output", "dX", "dW")


def inputs():
    """name -> array: x (N, K), w (out, K), bias, dy; rows of x that tie, and a token below the floor of the scale."""
    rng = np.random.default_rng(158)
    x, w = rng.standard_normal((12, 64)), rng.standard_normal((32, 64)) * 0.05
    x[8:11] = rng.choice([-1, 1], (3, 64)) * (rng.integers(0, 100, (3, 64)) + 0.5) / 64
    x[8:11, 0] = 127 / 64  # the scale is 64: every value lies on a half
    x[11] *= 1e-7
    ties = np.tile([0.5, 1.5], 32) * rng.choice([-1, 1], (32, 64)) / 16  # the mean of |w| is 1/16: half of them tie
    arrays = {"x": x, "w": w, "ties": ties, "bias": rng.standard_normal(32), "dy": rng.standard_normal((12, 32))}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


# -- in the package's interpreter --------------------------------------------------------------------------------------


def probe(package, given):
    """-> "variant/line" -> array, and "variant/failed" -> text"""
    import torch

    t = {name: torch.from_numpy(array) for name, array in given.items()}
    out = {}
    for variant, weight, make in VARIANTS[package](torch, t):
        try:
            x = t["x"].clone().requires_grad_()
            normed, x_dq, w_dq, layer = make(t[weight], x)
            lines = {"normed": normed, "x_dq": x_dq, "w_dq": w_dq, "w": t[weight]}
            if layer is not None:
                y = layer(x)
                y.backward(t["dy"])
                lines |= {"y": y, "dX": x.grad}
                own = dict(layer.named_parameters()).get("weight")
                lines |= {} if own is None or own.grad is None else {"dW": own.grad}
                bias = getattr(layer, "bias", None)
                lines |= {} if bias is None else {"bias": bias}
        except Exception as error:
            lines = {"failed": np.array(f"{type(error).__name__}: {error}")}
        for name, value in lines.items():
            out[f"{variant}/{name}"] = value if isinstance(value, np.ndarray) else value.detach().numpy()
    return out


def of_bitnet(torch, t):
    site = Path(torch.__file__).parent.parent
    for name in ("bitnet", "zeta", "zeta.nn", "zeta.nn.modules"):
        # a package without its __init__, which imports all of torchvision: BitLinear needs none of it
        sys.modules[name] = module = type(sys)(name)
        module.__path__ = [str(site / name.replace(".", "/"))]
    from bitnet import bitlinear

    def make(w, x):
        layer = bitlinear.BitLinear(*w.shape[::-1], bias=False)
        layer.weight.data = w.clone()
        normed = bitlinear.SimpleRMSNorm(w.shape[1])(x)
        return normed, bitlinear.activation_quant(normed), bitlinear.weight_quant(w), layer

    yield "BitLinear", "w", make


def of_bitlinear(torch, t):
    from bitlinear import bitlinear

    def make(w, x, **options):
        layer = bitlinear.BitLinear(*w.shape[::-1], **options)
        layer.weight.data, layer.bias.data = w.clone(), t["bias"].clone()
        normed = x if layer.norm is None else layer.norm(x)
        quantized = []
        for value, limits, measure, per_token in (
            (normed, layer.activation_range, layer.activation_measure, True),
            (w, layer.weight_range, layer.weight_measure, False),
        ):
            scale = bitlinear.scale(value, limits, measure, per_token, layer.eps)
            quantized.append(bitlinear.round_clamp(value * scale, limits) / scale)
        return normed, *quantized, layer

    yield "BitLinear", "w", make
    yield 'BitLinear, "AbsMean", no norm', "w", lambda w, x: make(w, x, weight_measure="AbsMean", norm=None)


def of_onebitllms(torch, t):
    from contextlib import nullcontext

    from onebitllms.kernels import activation_quant, weight_quant
    from onebitllms.layers import bitnet
    from onebitllms.utils.quantization_utils import _weight_quant

    class OnProcessor(torch.Tensor):
        is_cuda = True  # the kernels' driver asserts it; the interpreter takes any tensor

    def quantize_weight(w):
        return weight_quant.weight_quant_triton(w.detach().as_subclass(OnProcessor)).as_subclass(torch.Tensor)

    def quantize_activations(x):
        return activation_quant.activation_quant_triton(x.detach()[None])[0]

    bitnet.weight_quant_triton, bitnet.activation_quant_triton = quantize_weight, quantize_activations
    torch.cuda.device = lambda device: nullcontext()

    def make(w, x):
        layer = bitnet.BitNetLinear(*w.shape[::-1])
        layer.weight.data = w.clone()
        return x, quantize_activations(x), quantize_weight(w), layer

    yield "BitNetLinear", "w", make
    yield "BitNetLinear, weights that tie", "ties", make

    def convert(w, x):
        w_t, scale = _weight_quant(w)
        return x, None, w_t / scale, None

    def weights_alone(w, x):
        normed, _, w_dq, layer = convert(w, x)
        return normed, torch.full_like(x, float("nan")), w_dq, layer

    yield "quantize_to_1bit, weights that tie", "ties", weights_alone


def of_transformers(torch, t):
    from transformers.integrations import bitnet

    def online(w, x):
        layer = bitnet.AutoBitLinear(*w.shape[::-1], bias=True, online_quant=True)
        layer.weight.data, layer.bias.data = w.clone(), t["bias"].clone()
        return x, bitnet.ActQuant.apply(x), bitnet.WeightQuant.apply(w), layer

    def planes(w):
        scale = w.abs().mean()
        return (w / scale).round().clamp(-1, 1), scale

    def offline(w, x):
        layer = bitnet.AutoBitLinear(*w.shape[::-1], bias=False)
        layer.weight.data, layer.weight_scale = planes(w)
        layer.weight.requires_grad_(False)
        return x, bitnet.ActQuant.apply(x), planes(w)[0] * planes(w)[1], layer

    def packed(w, x):
        layer = bitnet.BitLinear(*w.shape[::-1], bias=False, dtype=torch.float32)
        w_t, scale = planes(w)
        layer.weight, layer.weight_scale = bitnet.pack_weights(w_t), (1 / scale).view(1)
        x_q, x_scale = layer.activation_quant(x)
        return x, x_q / x_scale, bitnet.unpack_weights(layer.weight, torch.float32) * scale, layer

    yield "AutoBitLinear, online", "w", online
    yield "AutoBitLinear, online, weights that tie", "ties", online
    yield "AutoBitLinear, offline", "w", offline
    yield "BitLinear", "w", packed


VARIANTS = {
    "bitnet": of_bitnet,
    "bitlinear": of_bitlinear,
    "onebitllms": of_onebitllms,
    "transformers": of_transformers,
}


# -- here: the reference on each line ----------------------------------------------------------------------------------


def half_up(v):
    return np.floor(v + np.float32(0.5))


def scaled(x, levels, rounding, largest):
    scale = np.float32(levels) / np.maximum(largest, np.float32(1e-5))
    return np.clip(rounding(x * scale), -128, 127) / scale


def of_activations(x):
    """name of a rule -> dequantised activations"""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    yield "right", scaled(x, 127, np.rint, largest)
    yield "ties are rounded up: floor(x + 0.5)", scaled(x, 127, half_up, largest)
    yield "128 / max, where 127 / max belongs", scaled(x, 128, np.rint, largest)


def of_weights(w):
    mean, median = np.abs(w).mean(), np.sort(np.abs(w).reshape(-1))[(w.size - 1) // 2]
    yield "right", np.clip(np.rint(w / mean), -1, 1) * mean
    yield "sign(w - mean w): two values, no zeros", np.sign(w - w.mean()) * mean
    yield "the scale is the median of abs(w), not the mean", np.clip(np.rint(w / median), -1, 1) * median
    yield "ties are rounded up: floor(w + 0.5)", np.clip(half_up(w / mean), -1, 1) * mean


def of_outputs(lines):
    y = lines["x_dq"].astype(np.float64) @ lines["w_dq"].T.astype(np.float64)
    bias = lines.get("bias", np.zeros(y.shape[1]))
    yield "right", y + bias
    largest = np.maximum(np.abs(lines["normed"]).max(axis=-1, keepdims=True), 1e-5)
    for levels in (127, 128):
        for w_scale in (np.abs(lines["w"]).mean(), np.abs(lines["w_dq"]).max()):
            yield "the bias is divided by both scales", y + bias * largest / levels * w_scale


def back_through_norm(lines, x, d):
    """dX of the norm that the layer has inside: none, RMSNorm or LayerNorm without weights."""
    x, d = x.astype(np.float64), d.astype(np.float64)
    n = lines["normed"].astype(np.float64)
    if np.array_equal(n, x):
        return d
    centred = abs(n.mean(axis=-1)).max() < 1e-3 * abs(n).max()
    # from n = (x - mean) / r: r is the same for every value of the row
    shift = x.mean(axis=-1, keepdims=True) if centred else 0
    r = np.linalg.norm(x - shift, axis=-1, keepdims=True) / np.linalg.norm(n, axis=-1, keepdims=True)
    out = d - n * ((d * n).sum(axis=-1, keepdims=True) / np.maximum((n * n).sum(axis=-1, keepdims=True), 1e-30))
    return (out - (out.mean(axis=-1, keepdims=True) if centred else 0)) / r


def named(rules, given, rows=slice(None), limit=1e-5):
    """The first rule that gives the package's line."""
    for name, value in rules:
        error = np.abs(value[rows] - given[rows]).max(axis=-1, initial=0)
        if (error <= limit * np.maximum(np.abs(value[rows]).max(axis=-1), 1e-12)).all():
            return name
    return "differs from the reference and from every rule that was tried"


def judge(lines, given):
    """line -> what is wrong with it, or "right", or "-" """
    out = dict.fromkeys(LINES, "-")
    if "failed" in lines:
        return out | {"activations": f"does not run: {lines['failed']}"}
    if not np.isnan(lines["x_dq"]).any():
        out["activations"] = named(of_activations(lines["normed"]), lines["x_dq"])
    out["weights"] = named(of_weights(lines["w"]), lines["w_dq"])
    if "y" in lines:
        out["output"] = named(of_outputs(lines), lines["y"])
    if "dX" in lines:
        plain = back_through_norm(lines, given["x"], given["dy"].astype(np.float64) @ lines["w_dq"])
        rows = slice(11)  # the last token is below a norm's eps
        largest = np.abs(given["x"]) == np.abs(given["x"]).max(axis=-1, keepdims=True)
        by_scale = (
            (given["dy"] * lines["y"]).sum(axis=-1, keepdims=True)
            / given["x"]
            * largest
            / largest.sum(axis=-1, keepdims=True)
        )
        rules = [("right", plain), ("through the scale alone: rounding passes nothing", by_scale)]
        out["dX"] = named(rules, lines["dX"], rows, 1e-3)
    if "dW" in lines:
        right = given["dy"].T.astype(np.float64) @ lines["x_dq"]
        unrounded = given["dy"].T.astype(np.float64) @ lines["normed"]
        rules = [("right", right), ("of the activations before their quantisation", unrounded)]
        out["dW"] = named(rules, lines["dW"], limit=1e-4)
    return out


def norm_inside(lines, x):
    n = lines.get("normed")
    if n is None or np.array_equal(n, x):
        return "none"
    if abs(n.mean(axis=-1)).max() < 1e-3 * abs(n).max():
        return "LayerNorm, no weight"
    size = float(np.sqrt((n[:8].astype(np.float64) ** 2).mean()))
    return "RMSNorm, no weight" + ("" if abs(size - 1) < 1e-3 else f", **times {size:.4g}: dim^-0.5 for dim^0.5**")


def ask(package, python, given):
    """-> (version, variant -> lines)"""
    data = io.BytesIO()
    np.savez(data, **given)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [python, str(Path(__file__).resolve()), "--probe", package]
    done = subprocess.run(command, input=data.getvalue(), capture_output=True, env=env, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{package}: {done.stderr.decode()[-600:]}")
    variants = {}
    with np.load(io.BytesIO(done.stdout), allow_pickle=False) as archive:
        version = str(archive["version"])
        for key in archive.files:
            variant, _, line = key.rpartition("/")
            if variant:
                variants.setdefault(variant, {})[line] = archive[key]
    return version, variants


def table(pythons):
    given = inputs()
    rows = ["| package | class | norm inside | " + " | ".join(LINES) + " |", "|" + "---|" * (3 + len(LINES))]
    for package, python in pythons.items():
        version, variants = ask(package, python, given)
        for variant, lines in variants.items():
            verdict = judge(lines, given)
            cells = [verdict[line] if verdict[line] in ("right", "-") else f"**{verdict[line]}**" for line in LINES]
            rows.append(f"| {package} {version} | {variant} | {norm_inside(lines, given['x'])} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main(arguments):
    if arguments[:1] == ["--probe"]:
        from importlib.metadata import version

        with np.load(io.BytesIO(sys.stdin.buffer.read())) as archive:
            given = dict(archive)
        stdout, sys.stdout = sys.stdout, sys.stderr  # some packages print when they are imported
        out = probe(arguments[1], given)
        data = io.BytesIO()
        np.savez(data, version=np.array(version(arguments[1])), **out)
        stdout.buffer.write(data.getvalue())
        return
    pythons = dict(each.split("=", 1) for each in arguments if "=" in each)
    if not pythons or set(pythons) - set(VARIANTS):
        sys.exit(__doc__)
    text = table(pythons)
    print(text, end="")
    if "--write" in arguments:
        before, rest = PAGE.read_text(encoding="utf-8").split("| package | class |", 1)
        after = rest.split("\n\n", 1)[1] if "\n\n" in rest else ""
        PAGE.write_text(f"{before}{text}" + (f"\n{after}" if after else ""), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
