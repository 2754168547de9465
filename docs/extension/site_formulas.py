"""Formulas as MathML, which browsers draw themselves: no script, no font and no other site is needed."""

from docutils.nodes import SkipNode
from latex2mathml.converter import convert


def write_inline(writer, node):
    writer.body.append(convert(node.astext()))
    raise SkipNode


def write_block(writer, node):
    writer.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>')
    raise SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (write_inline, None), (write_block, None))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True}
