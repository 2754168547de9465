"""Pictures made from the code: the rooms of the package with their imports, a token's way through a layer, and the bars
of docs/speed.json, which scripts/benchmarks/report.py wrote.

SVG that stands in the page, in the page's own colours, light or dark.
"""

import ast
import importlib
import inspect
import json
import sys
import textwrap
from functools import cache
from html import escape
from pathlib import Path

import bitnet_ref

PACKAGE = Path(bitnet_ref.__file__).parent
sys.path.append(str(PACKAGE.parent / "scripts" / "benchmarks"))
report = importlib.import_module("report")
IMPORT_TESTS = PACKAGE.parent / "tests" / "test_imports.py"
COLOURS = {"int8": "#d97706", "int32": "#dc2626", "float32": "var(--color-foreground-secondary, #555)"}


def text(x, y, content, size=13, colour="var(--color-foreground-primary, #111)", **attributes):
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}"{more}>{escape(content)}</text>'


def box(x, y, width, height, fill="var(--color-background-secondary, #f6f6f6)"):
    stroke = "var(--color-background-border, #ccc)"
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{stroke}"/>'


def line(x1, y1, x2, y2, width=1.5):
    colour = "var(--color-foreground-muted, #888)"
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="{width}"/>'


def picture(width, height, parts, label):
    return (
        f'<div class="diagram"><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg></div>\n'
    )


# -- the house ---------------------------------------------------------------------------------------------------------


@cache
def room_order():
    """The rooms from the lowest to the highest: ROWS of tests/test_imports.py, which holds that imports point down."""
    for node in ast.parse(IMPORT_TESTS.read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "ROWS":
            return [name for names in ast.literal_eval(node.value) for name in sorted(names)]
    raise LookupError(f"{IMPORT_TESTS}: no ROWS")


def files_of(room):
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{room}.py"]


@cache
def rooms_imported_by(room):
    """The other rooms that a room's files import, also inside functions."""
    rooms, imported = room_order(), set()
    for path in files_of(room):
        package = path.relative_to(PACKAGE).parts[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
                imported |= {base[0]} if base[0] else {alias.name for alias in node.names}
    return {name if name in rooms else "__init__" for name in imported} - {room}


def purpose(room):
    """The first sentence of a room's docstring."""
    module = importlib.import_module("bitnet_ref" if room == "__init__" else f"bitnet_ref.{room}")
    return inspect.getdoc(module).partition("\n")[0].partition(". ")[0].rstrip(".").replace("`", "")


def draw_house():
    rooms = [room for room in reversed(room_order()) if room != "__main__"]
    floor, wide, cell, top = 40, 500, 20, 92
    parts = []
    for i, room in enumerate(rooms):
        y, x = top + i * floor, wide + 14 + i * cell
        name = "bitnet_ref" if room == "__init__" else room
        count = len(files_of(room))
        parts += [box(0, y, wide, floor - 4), text(10, y + 23, name, font_weight="bold")]
        rows = textwrap.wrap(purpose(room), 56)
        parts += [text(104, y + 16 + 14 * j + 7 * (len(rows) == 1), row, 11.5) for j, row in enumerate(rows)]
        parts += [text(wide - 8, y + 23, f"{count} file{'s' * (count > 1)}", 10, text_anchor="end")]
        parts += [line(wide, y + 18, x + 10, y + 18, 0.5), line(x + 10, top - 6, x + 10, y + 18, 0.3)]
        turn = f"rotate(-60 {x + 14} {top - 8})"
        parts += [box(x + 4, y + 12, 12, 12), text(x + 14, top - 8, name, 12, transform=turn)]
        imported = rooms_imported_by(room)
        for j, other in enumerate(rooms):
            if other in imported:
                colour = "var(--color-brand-primary, #06c)" if j > i else "#dc2626"
                title = f"<title>{name} imports {other}</title>"
                parts.append(
                    f'<circle cx="{wide + 24 + j * cell}" cy="{y + 18}" r="4.5" fill="{colour}">{title}</circle>'
                )
    return picture(wide + 70 + len(rooms) * cell, top + len(rooms) * floor, parts, "Parts of bitnet_ref and imports")


# -- a token's way -----------------------------------------------------------------------------------------------------

STEPS = {  # by the part of the trace names that they share
    "ln1": "RMSNorm before attention",
    "attn.q_proj": "queries",
    "attn.k_proj": "keys",
    "attn.v_proj": "values",
    "attn": "heads, RoPE, scores, softmax, weighted values",
    "attn.sub_norm": "RMSNorm before the output projection",
    "attn.o_proj": "BitLinear: output projection",
    "ln2": "RMSNorm before the feed-forward block",
    "mlp.gate_proj": "BitLinear: gate",
    "mlp.up_proj": "BitLinear: up",
    "mlp": "gate: relu(pre)² × pre_linear",
    "mlp.sub_norm": "RMSNorm before the down projection",
    "mlp.down_proj": "BitLinear: down",
}
BESIDE = {  # (column, columns)
    **{f"attn.{name}_proj": (column, 3) for column, name in enumerate("qkv")},
    **{f"mlp.{name}_proj": (column, 2) for column, name in enumerate(("gate", "up"))},
}


def trace_steps():
    """[(shared part of the names, [(last part, array)])] of layer 0, in the order of the computation."""
    model = bitnet_ref.load("storyteller", backend="numpy")
    _, trace = model.run_with_cache("The rabbit ran", names_filter="blocks.0.*")
    steps = []
    for name, array in trace.items():
        group, _, last = name.removeprefix("blocks.0.").rpartition(".")
        if not steps or steps[-1][0] != group or not group:
            steps.append((group, []))
        steps[-1][1].append((last.removeprefix("hook_"), array))
    return steps


def value_row(x, right, y, name, array):
    """One name of the trace: shape, dtype, range of the last token (the last row of the token axis)."""
    dtype = array.dtype.name
    last = array[:, -1] if name in ("attn_scores", "pattern") else array[-1]
    low, high = (f"{value}" if dtype != "float32" else f"{value:.3g}" for value in (last.min(), last.max()))
    shape = "×".join(map(str, array.shape))
    return [
        text(x, y, name, 11.5, font_family="var(--font-stack--monospace, monospace)"),
        text(right - 102, y, f"{shape} {dtype}", 11, COLOURS[dtype], text_anchor="end"),
        text(right, y, low if low == high else f"{low} … {high}", 11, text_anchor="end"),
    ]


def draw_layer():
    """The residual stream runs down on the left. A block leaves it at a norm and is added to it at the end."""
    width, left, gap, row, stream = 920, 100, 9, 19, 30
    parts, y, start = [], 0, 0
    for group, values in trace_steps():
        place, count = BESIDE.get(group, (0, 1))
        wide = (width - left - gap * (count - 1)) / count if count > 1 else 400
        height = row * (len(values) + bool(group)) + 12
        x = left + place * (wide + gap)
        if group:
            parts += [box(x, y, wide, height), text(x + 10, y + 19, group, 12.5, font_weight="bold")]
            parts.append(text(x + 18 + 8.2 * len(group), y + 19, STEPS[group], 11.5))
            if group in ("ln1", "ln2"):
                parts.append(line(stream, y + 14, x, y + 14))
        elif values[0][0].endswith("_out"):
            parts += [box(x, y, wide, height), line(stream + 10, y + height / 2, x, y + height / 2)]
            parts += [text(stream, y + height / 2 + 7, "+", 22, text_anchor="middle")]
            parts += [line(stream, start, stream, y + 6, 3), line(stream, y + height - 5, stream, y + height + gap, 3)]
        else:
            x, start = 0, y + height
            parts.append(box(x, y, wide, height))
        for i, (name, array) in enumerate(values):
            parts += value_row(x + 10, x + wide - 10, y + 19 + row * (i + bool(group)), name, array)
        if place == count - 1:
            y += height + gap
    return picture(width, y, parts, "A token's way through layer 0 of storyteller")


def draw(app):
    folder = Path(app.srcdir) / "generated"
    folder.mkdir(exist_ok=True)
    measured = report.BenchReport.of(json.loads((Path(app.srcdir) / "speed.json").read_text()))
    pictures = {"house": draw_house(), "layer": draw_layer()}
    for part in ("decode", "prompt"):
        pictures[f"speed_{part}"] = report.draw_bars(measured, part) + "\n"
    for name, content in pictures.items():
        path = folder / f"{name}.svg"
        if not path.is_file() or path.read_text() != content:  # Sphinx reads the page again only after a change
            path.write_text(content)


def setup(app):
    app.connect("builder-inited", draw)
    return {"parallel_read_safe": True}
