"""One tensor of a model by its name, as text, as a figure, as HTML: `show_tensor(path, name)` -> `TensorView`.

A ternary matrix is shown as a map of its non-zeros and as the shares of -1, 0 and +1 in bands of rows and of columns;
any other tensor as a histogram. matplotlib is imported only for a figure.
"""

from __future__ import annotations

import difflib
import html
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendUnavailable, BitNetRefError, ConfigError, printable
from ..formats.checkpoint import Checkpoint, LoadOptions, norms_of_layer, read_part
from ..formats.gguf.blocks import BY_PACKAGE, DEQUANTIZABLE, dequantize
from ..formats.gguf.file import PLAIN_DTYPES, open_gguf
from ..formats.names import gguf_name, hf_module, hf_modules
from ..formats.onnx.file import OnnxFile
from ..formats.open import choose_format, find_model, open_checkpoint
from ..formats.safetensors import SafetensorsFile
from ..notebook.figures import FLOAT, MINUS, PLUS, Figure, new_figure, plain
from ..reference.layers import Array
from ..reference.weights import LinearWeight, linear_name

Bands = list[tuple[int, int, tuple[float, float, float]]]  # (first, last + 1, shares of -1, 0, +1)
_ZERO = "#e3e3e3"  # the colour of a weight of 0
_CORNER = (8, 64)  # rows and columns shown weight by weight
_LAYER = re.compile(r"(?:blocks|blk|model\.layers)\.([0-9]{1,18})\.")
ReadTensor = Callable[[], tuple[str, NDArray[Any]]]  # -> (dtype, values)


def show_tensor(path: str | os.PathLike[str], name: str, options: LoadOptions | None = None) -> TensorView:
    """One tensor of a model in any format that `load` reads.

    name: ours ("blocks.0.attn.q_proj", "embedding", "final_norm"), or the file's own ("blk.0.attn_q.weight"). A part of
    the model is shown as the reader returns it: a ternary matrix as -1, 0 and +1 with its scale. Any other tensor of
    the file is shown as stored. Raises ConfigError for an unknown name, and what the reader raises.
    """
    model_path = find_model(path)
    try:
        checkpoint = open_checkpoint(model_path, options)
    except BitNetRefError as error:
        return _show_stored(model_path, name, str(path), {}, error)
    with checkpoint:
        names = _part_names(checkpoint, name)
        if name not in names:
            return _show_stored(model_path, name, str(path), names, None)
        part = read_part(checkpoint, names[name])
    if isinstance(part, LinearWeight) and (ternary := part.bit_linear) is not None:
        w_t: NDArray[Any] = ternary.ternary()
        scale = float(ternary.w_dequant_scale)
        return TensorView(str(path), names[name], f"ternary ({checkpoint.kind})", w_t, scale)
    array: NDArray[Any] = part if isinstance(part, np.ndarray) else part.array
    return TensorView(str(path), names[name], f"{array.dtype.name} ({checkpoint.kind})", _widen(array))


def _part_names(checkpoint: Checkpoint, name: str) -> dict[str, str]:
    """Every name, in any format, of the parts outside the layers and of one layer -> our name.

    The layer is the one in `name`, or else the first: a configuration may claim billions of layers.
    """
    match = _LAYER.match(name)
    index = int(match[1]) if match and int(match[1]) < checkpoint.config.num_hidden_layers else 0
    config, out = checkpoint.config, {"embedding": "embedding"}
    out |= {f"{name}.weight": "embedding" for name in (hf_module("embedding"), gguf_name("embedding"))}
    for norm in (*norms_of_layer(config, index), "final_norm"):
        stored = [f"{module}.weight" for module in (gguf_name(norm, config), *hf_modules(norm, config))]
        out |= dict.fromkeys((norm, *stored), norm)
    linears = [linear_name(index, short) for short in config.linear_shapes(index)]
    for linear in (*linears, *([] if config.tie_word_embeddings else ["lm_head"])):
        spellings = (linear, hf_module(linear), gguf_name(linear))
        stored = [f"{one}{suffix}" for one in spellings for suffix in ("", ".weight", ".packed", ".trits")]
        out |= dict.fromkeys((*stored, f"{hf_module(linear)}.weight_packed"), linear)
    return out


def _show_stored(
    path: Path, name: str, shown_path: str, known: dict[str, str], error: BitNetRefError | None
) -> TensorView:
    """A tensor that is not a part of the model, or of a file that is not a model because of `error`."""
    try:
        readers = _stored_tensors(path)
    except BitNetRefError as problem:
        raise error or problem from None
    if name not in readers:
        if error is not None and not readers:
            raise error
        near = difflib.get_close_matches(name, sorted({*known, *readers}), n=3, cutoff=0.5)
        near = near or list(known or readers)[:3]
        reason = "" if error is None else f". Only the file's own names can be used, as it cannot be loaded: {error}"
        raise ConfigError(f"there is no tensor {name!r}; near it are {', '.join(near)}{reason}")
    dtype, values = readers[name]()
    return TensorView(shown_path, name, f"{dtype}, as stored", _widen(values))


def _stored_tensors(path: Path) -> dict[str, ReadTensor]:
    """Every tensor in a file or folder, whatever it is for: name -> how to read it."""
    format_name, path = choose_format(path)
    if format_name == "gguf":
        with open_gguf(path) as gguf:
            return {name: partial(_read_gguf, path, name) for name in gguf.tensors}
    if format_name == "onnx":
        onnx = OnnxFile(path)
        return {name: partial(_read_onnx, onnx, name) for name in onnx.tensors}
    readers: dict[str, ReadTensor] = {}
    folder = path if path.is_dir() else None
    for file in [path] if folder is None else sorted(folder.glob("*.safetensors")):
        with SafetensorsFile(file, folder) as safetensors:
            readers |= {name: partial(_read_safetensors, file, folder, name) for name in safetensors.tensors}
    return readers


def _read_safetensors(path: Path, folder: Path | None, name: str) -> tuple[str, NDArray[Any]]:
    with SafetensorsFile(path, folder) as file:
        return file.tensors[name].dtype, file.read(name)


def _read_gguf(path: Path, name: str) -> tuple[str, NDArray[Any]]:
    with open_gguf(path) as file:
        dtype, shape = file.tensors[name].type.name, file.tensors[name].shape
        if dtype in PLAIN_DTYPES:
            return dtype, file.read(name)
        raw = file.read_raw(name)
    return (
        (dtype, dequantize(raw, dtype, shape))
        if dtype in (*DEQUANTIZABLE, *BY_PACKAGE)
        else (f"{dtype}, its bytes", raw)
    )


def _read_onnx(file: Any, name: str) -> tuple[str, NDArray[Any]]:
    values = file.read(name)
    return values.dtype.name, values


def _widen(values: NDArray[Any]) -> NDArray[Any]:
    """Integers and float64 unchanged; bfloat16, float16 and float32 as float32."""
    if values.dtype.kind in "iub" or values.dtype == np.float64:
        return values
    with np.errstate(invalid="ignore"):  # a signalling NaN of 16 bits would be a warning
        return values.astype(np.float32)


@dataclass(frozen=True)
class TensorView:
    """A tensor and its statistics.

    values: the weights of a ternary matrix (N, K) int8, or the tensor in float32 or an integer dtype.
    """

    path: str
    name: str
    stored_as: str  # the file's own dtype or type, or that of the reader
    values: NDArray[Any]
    w_dequant_scale: float | None = None  # of a ternary matrix

    @property
    def is_ternary(self) -> bool:
        """Whether it is a BitLinear's weight."""
        return self.w_dequant_scale is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def shares(self) -> tuple[float, float, float]:
        """Shares of -1, 0 and +1 in a ternary matrix."""
        return _shares(self.values)

    def bands(self, axis: int, count: int = 8) -> Bands:
        """Shares in `count` bands of rows (axis 0) or of columns (axis 1) of a ternary matrix."""
        edges = np.linspace(0, self.shape[axis], min(count, self.shape[axis]) + 1).round().astype(int)
        pieces = [(int(a), int(b)) for a, b in pairwise(edges)]
        return [(a, b, _shares(self.values[a:b] if axis == 0 else self.values[:, a:b])) for a, b in pieces]

    def nonzero_map(self, rows: int, columns: int) -> NDArray[np.float32]:
        """Share of non-zeros in a grid of at most rows x columns cells over a ternary matrix."""
        shares: Array = self.values != 0
        for axis, cells in ((0, rows), (1, columns)):
            count = min(cells, self.shape[axis])
            starts = np.linspace(0, self.shape[axis], count + 1).round().astype(np.intp)
            sums = np.add.reduceat(shares, starts[:-1], axis=axis, dtype=np.float32)
            sizes = np.diff(starts).astype(np.float32)
            shares = sums / (sizes[:, None] if axis == 0 else sizes)
        return shares

    def statistics(self) -> dict[str, Any]:
        """What `text` shows, as JSON values. Statistics of floats are those of the finite ones."""
        out: dict[str, Any] = {"name": self.name, "shape": list(self.shape), "stored_as": self.stored_as}
        out["ternary"] = self.is_ternary
        if self.is_ternary:
            out |= {"w_dequant_scale": self.w_dequant_scale, "shares": list(self.shares())}
            for axis, what in ((0, "rows"), (1, "columns")):
                out[what] = [{"from": a, "to": b, "shares": list(shares)} for a, b, shares in self.bands(axis)]
            return out
        flat = self.values.reshape(-1)
        finite = flat[np.isfinite(flat)]
        out |= {"values": int(flat.size), "not_finite": int(flat.size - finite.size)}
        if finite.size:
            wide = finite.astype(np.float64)
            out |= {"min": float(wide.min()), "max": float(wide.max()), "mean": float(wide.mean())}
            out |= {"std": float(wide.std()), "mean_abs": float(np.abs(wide).mean())}
            out |= {"zeros": int((wide == 0).sum()), "distinct": int(np.unique(finite).size)}
            counts, edges = self.histogram()
            out["histogram"] = {"counts": counts.tolist(), "edges": edges.tolist()}
        return out

    def histogram(self, bins: int = 16) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(counts (bins,), edges (bins + 1,)) of the finite values."""
        flat = self.values.reshape(-1)
        counts, edges = np.histogram(flat[np.isfinite(flat)].astype(np.float64), bins=bins)
        return counts.astype(np.int64), edges

    def text(self, width: int = 100, unicode: bool = True) -> str:
        """For a shell: lines of at most `width` characters, or 40 if the width is smaller."""
        shape = " x ".join(map(str, self.shape)) or "scalar"
        lines = self._ternary_lines(max(40, width), unicode) if self.is_ternary else self._dense_lines(width, unicode)
        return "\n".join(
            line.rstrip() for line in [f"{printable(self.name, keep='')}: {shape}, {self.stored_as}", *lines]
        )

    def __str__(self) -> str:
        return self.text()

    def _ternary_lines(self, width: int, unicode: bool) -> Iterator[str]:
        minus, zero, plus = self.shares()
        yield f"-1: {minus:.1%}, 0: {zero:.1%}, +1: {plus:.1%}, each times w_dequant_scale {self.w_dequant_scale:.6g}"
        inks = " ░▒▓█" if unicode else " .:*#"
        grid = self.nonzero_map(16, min(64, width - 2))
        low, high = float(grid.min()), float(grid.max())
        yield ""
        if high > low:
            yield f"Share of non-zeros, from {low:.1%} ('{inks[0]}') to {high:.1%} ('{inks[-1]}'):"
        else:
            yield f"Share of non-zeros: {low:.1%} everywhere"
        levels = (grid - low) / (high - low or 1) * (len(inks) - 1)
        for row in np.rint(levels).astype(int):
            yield "|" + "".join(inks[level] for level in row) + "|"
        rows, columns = _CORNER[0], min(_CORNER[1], width - 2)
        yield ""
        yield "The first weights (-, . and + for -1, 0 and +1):"
        for weights in self.values[:rows, :columns]:
            yield " " + "".join("-.+"[value + 1] for value in weights)
        for axis, what in ((0, "rows"), (1, "columns")):
            yield ""
            yield f"{what:16}{'-1':>7}{'0':>7}{'+1':>7}"
            for first, end, shares in self.bands(axis):
                yield f"{f'{first} to {end - 1}':16}" + "".join(f"{share:7.1%}" for share in shares)

    def _dense_lines(self, width: int, unicode: bool) -> Iterator[str]:
        stats = self.statistics()
        if stats["not_finite"]:
            yield f"{stats['not_finite']} of {stats['values']} values are NaN or Inf"
        if "min" not in stats:
            return
        yield f"from {stats['min']:.6g} to {stats['max']:.6g}, mean {stats['mean']:.6g}, std {stats['std']:.6g}"
        yield f"mean size {stats['mean_abs']:.6g}, {stats['zeros']} zeros, {stats['distinct']} distinct values"
        yield ""
        counts, edges = self.histogram()
        ink, highest = ("█" if unicode else "#"), max(1, int(counts.max()))
        for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
            bar = ink * round(max(10, min(60, width - 40)) * int(count) / highest)
            yield f"{left:11.4g} to {right:<11.4g}{count:>9}  {bar}"

    def figure(self) -> Figure:
        """A matplotlib figure. Raises BackendUnavailable, with the command that installs it, when it is missing."""
        ratios = [1.2, 1.2, 1] if self.is_ternary else [1]
        figure, ((left, *others),) = new_figure(1, len(ratios), size=(9, 3), width_ratios=ratios)
        if not self.is_ternary:
            counts, edges = self.histogram(bins=64)
            left.stairs(counts, edges, fill=True, color=FLOAT)
            left.set(title=plain(self.name), xlabel="value", ylabel="count")
            return figure
        from matplotlib.colors import ListedColormap

        middle, right = others
        colours = ListedColormap([MINUS, _ZERO, PLUS])
        left.imshow(self.values[:48, :64], cmap=colours, vmin=-1, vmax=1, interpolation="nearest")
        left.set(title="the first 48 x 64", xlabel="input", ylabel="output")
        grid = self.nonzero_map(max(1, min(96, self.shape[0] // 8)), max(1, min(96, self.shape[1] // 8)))
        extent = (0, self.shape[1], self.shape[0], 0)
        shown = middle.imshow(grid, cmap="magma", aspect="auto", interpolation="nearest", extent=extent)
        middle.set(title="share of non-zeros", xlabel="input")
        figure.colorbar(shown, ax=middle)
        bands = self.bands(0)
        start = np.zeros(len(bands))
        places = [(first + end) / 2 for first, end, _ in bands]
        for value, colour in enumerate((MINUS, _ZERO, PLUS)):
            part = np.array([shares[value] for _, _, shares in bands])
            height = [0.9 * (end - first) for first, end, _ in bands]
            right.barh(places, part, left=start, height=height, color=colour)
            start = start + part
        right.set(title="-1, 0 and +1 by row", xlabel="share", xlim=(0, 1), ylim=(self.shape[0], 0))
        return figure

    def _repr_html_(self) -> str:
        """For notebooks: two lines of facts and the figure; the text without matplotlib."""
        try:
            figure: Any = self.figure()
        except BackendUnavailable:
            return f"<pre>{html.escape(self.text())}</pre>"
        facts, png = html.escape("\n".join(self.text().splitlines()[:2])), b64encode(figure._repr_png_()[0]).decode()
        return f'<pre>{facts}</pre><img src="data:image/png;base64,{png}">'


def _shares(w_t: NDArray[np.int8]) -> tuple[float, float, float]:
    counts = np.bincount((w_t + np.int8(1)).view(np.uint8).reshape(-1), minlength=3) / max(1, w_t.size)
    return float(counts[0]), float(counts[1]), float(counts[2])
