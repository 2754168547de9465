"""Sliders that redraw a figure: headless, without ipywidgets, and with values that cannot be drawn."""

import base64
import sys

import pytest
from helpers import model

from bitnet_ref.errors import BackendUnavailable, GenerationError
from bitnet_ref.notebook import NextToken, figures

pytest.importorskip("matplotlib")


@pytest.fixture
def after():
    return NextToken(model("storyteller"), "The rabbit ran")


@pytest.mark.thorough
def test_a_moved_slider_draws_again(after):
    pytest.importorskip("ipywidgets")
    explorer = after.explore(top_p=0.9)
    sliders = {each.description: each for each in explorer.widget.children if hasattr(each, "min")}
    image = explorer.widget.children[-1]
    assert {name: slider.value for name, slider in sliders.items()} == explorer.values
    before = image.value
    sliders["top_k"].value = 5
    assert explorer.values["top_k"] == 5
    assert image.value == explorer.png != before
    sliders["top_k"].value = 0
    assert image.value == before
    sliders["temperature"].value = 0  # greedy has a figure of its own
    assert image.value not in (before, b"")
    assert explorer.problem == ""
    sizes = set()
    for values in ({"top_k": 0}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "temperature": 2}, {"temperature": 0}):
        explorer.set(**values)
        sizes.add(explorer.png[16:24])  # width and height, in the header of a PNG
        assert len(explorer.draw(**explorer.values).axes) == 5
    assert len(sizes) == 1


@pytest.mark.thorough
def test_the_bundle_holds_a_picture_for_where_no_kernel_is(after):
    pytest.importorskip("ipywidgets")
    bundle, metadata = after.explore()._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert "temperature 1" in bundle["text/plain"]
    assert "temperature" in metadata["image/png"]["alt"]


@pytest.mark.thorough
def test_without_ipywidgets_it_is_a_picture(after, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    explorer = after.explore()
    assert explorer.widget is None
    assert set(explorer._repr_mimebundle_()[0]) == {"image/png", "text/plain"}


@pytest.mark.thorough
def test_what_cannot_be_drawn_is_said(after):
    explorer = after.explore()
    before = explorer.png
    explorer.set(temperature=-1)
    assert explorer.png == before
    assert "temperature: expected 0 or a number" in explorer.problem
    explorer.set(temperature=0.5)
    assert explorer.problem == ""


def test_wrong_parameters_raise_at_once(after):
    with pytest.raises(GenerationError, match="did you mean"):
        after.explore(typical=0.5)


def test_without_matplotlib_there_is_one_line(after, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    figures.figure_class.cache_clear()
    with pytest.raises(BackendUnavailable, match=r"pip install 'bitnet-ref\[notebooks\]'"):
        after.plot()
