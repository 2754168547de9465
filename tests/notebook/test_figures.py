"""Figures show the numbers that they are given: widths, heights, labels."""

import json
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from helpers import model

from bitnet_ref.errors import BackendUnavailable
from bitnet_ref.notebook.figures import describe_figure, plain, timeline
from bitnet_ref.notebook.lesson import PACKAGE, read_function, run_server
from bitnet_ref.notebook.panels import COLOURS, bars, cells, diagram, histogram, lines, panels, spans
from bitnet_ref.serving import cache_memory
from bitnet_ref.serving.cache_memory import tokens_held
from bitnet_ref.serving.records import StepPart, StepRecord

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def steps():
    prompts = ["Once upon a time", "The rabbit ran", "Alice", "The old man of the sea"]
    with model("storyteller").engine(max_batch=2, max_batch_tokens=6) as engine:
        handles = [engine.submit(prompt, max_tokens=3 + i) for i, prompt in enumerate(prompts)]
        for handle in handles:
            handle.result()
        return list(engine.timeline)


@pytest.mark.parametrize("by_step", [False, True])
def test_a_box_for_each_part_of_each_step(steps, by_step):
    top, below = timeline(steps, by_step=by_step).axes
    parts = [(i, step, part) for i, step in enumerate(steps) for part in step.parts]
    assert len(top.patches) == len(parts)
    for box, (i, step, part) in zip(top.patches, parts, strict=True):
        assert box.get_y() + box.get_height() / 2 == pytest.approx(part.slot)
        assert box.get_x() == pytest.approx(i if by_step else (step.start_s - steps[0].start_s) * 1e3)
        assert box.get_width() == pytest.approx(1 if by_step else step.seconds * 1e3)
        assert (box.get_hatch() is not None) == (part.kind == "prefill")
    assert [bar.get_height() for bar in below.patches] == [sum(part.tokens for part in s.parts) for s in steps]
    labels = {text.get_text().strip() for text in top.texts}
    assert labels == {str(part.request_id) for _, _, part in parts} == {"0", "1", "2", "3"}


def test_a_logarithmic_axis_is_described_by_its_ends():
    figure = panels(lines({"loss": ([1, 100], [1e-3, 2.5])}, xscale="log", yscale="log", xlabel="step"))
    assert describe_figure(figure) == "a chart (step from 1 to 100; from 0.001 to 2.5)"


def test_no_steps_is_an_empty_figure():
    assert len(timeline([]).axes) == 2


def test_cache_memory_is_what_a_cache_holds():
    story = model("storyteller")
    tokens = [1, 16, 17, 64, 200]
    found = cache_memory(story.config, tokens, window=32)
    assert list(found) == ["reserved", "float32", "float16", "int8", "sliding", "sinks"]
    pages = [1, 1, 2, 4, 13]
    for dtype in ("float32", "float16", "int8"):
        pool = story.new_cache(1, 256, dtype=dtype, page_size=16, pages=13)
        assert found[dtype].tolist() == [pool.nbytes // 13 * n for n in pages]
    assert set(found["reserved"]) == {story.new_cache(1, story.config.context_length).nbytes}
    assert found["float16"].tolist() == (found["float32"] // 2).tolist()
    assert (found["int8"] > found["float32"] // 4).all()  # and its scales
    page = found["float32"][0]
    assert (found["sliding"] // page).max() == 2


@pytest.mark.thorough
@pytest.mark.parametrize(("policy", "sinks"), [("sliding", 0), ("sinks", 4)])
def test_tokens_held_are_those_that_generation_sees(policy, sinks):
    """After each overflow that a real run reports, the tokens that it says the model saw."""
    out = model("storyteller").generate(
        [1, 5, 9], max_tokens=60, window=24, overflow=policy, sink_tokens=4, ignore_eos=True
    )
    held = tokens_held(3 + 60, 24, policy, sinks)
    assert len(out.overflows) > 2
    drops = [count for count in range(1, len(held)) if held[count] < held[count - 1]]
    for overflow, count in zip(out.overflows, drops, strict=True):
        assert count == overflow.kept[-1][1]
        assert held[count] == sum(stop - start for start, stop in overflow.kept)


def test_text_is_no_formula():
    assert plain("$5\n") == r"\$5⏎"


def test_panels_draw_their_data():
    draws = [
        bars(["a", "b"], {"one": [1, 2], "two": [3, 4]}, stacked=True, upright=True, colours={"two": "wrong"}),
        lines({"y": ([0, 1], [2, 3])}, marks={"flips": [0.5, 0.7]}, levels={"limit": 4}, title="t", legend="beside"),
        cells([[-1, 0, 1]], palette="ternary", text=[["-", "0", "+"]], rows=["r"], columns="xyz"),
        spans({"warp 0": [(0, 1, "write", "minus")]}, marks={"barrier": 1}),
        diagram({"in": (0, 0, "minus"), "out": (1, 0, "pale")}, [("in", "out", "y")]),
    ]
    figure = panels(*draws, rows=2)
    assert len(figure.axes) == 5  # the sixth place is empty
    stacked, line, table, boxes, flow = figure.axes
    assert [bar.get_height() for bar in stacked.patches] == [1, 2, 3, 4]
    assert [bar.get_y() for bar in stacked.patches] == [0, 0, 1, 2]
    assert line.lines[0].get_ydata().tolist() == [2, 3]
    assert len(line.lines) == 4
    assert line.get_title() == "t"
    assert np.asarray(table.images[0].get_array()).tolist() == [[-1, 0, 1]]
    shown = np.array([table.images[0].to_rgba(v, bytes=True)[:3] for v in (-1.0, 0.0, 1.0)])
    hexes = ["#" + bytes(colour).hex() for colour in shown]
    assert hexes == [COLOURS["minus"], COLOURS["zero"], COLOURS["plus"]]
    assert boxes.patches[0].get_width() == 1
    assert {text.get_text() for text in flow.texts} >= {"in", "out", "y"}
    png, metadata = figure._repr_png_()
    assert png.startswith(b"\x89PNG")
    assert metadata["alt"]
    assert len(metadata["gaps"]) == figure.axes[0].get_gridspec().ncols - 1


def test_panels_draw_counts_spreads_and_texts():
    draws = [
        histogram({"all": [0, 0, 1], "some": [[1]]}, [-0.5, 0.5, 1.5], title="t"),
        lines({"y": ([0, 1], [2, 3])}, bands={"y": ([1, 2], [3, 4])}, marks={"m": 0.5}, colours={"m": "good"}),
        bars(["a", "b"], {"one": [0, 2]}, text=["equal", "2.0"]),
    ]
    figure = panels(*draws, rows=3, heights=[2, 1, 1])
    counts, spread, named = figure.axes
    assert [bar.get_height() for bar in counts.patches] == [2, 1, 0, 1]
    assert (counts.get_ylabel(), counts.get_title(), len(counts.lines)) == ("count", "t", 0)
    band = spread.collections[0].get_paths()[0].vertices
    assert {tuple(point) for point in band.tolist()} == {(0, 1), (1, 2), (1, 4), (0, 3)}
    assert spread.lines[1].get_color() == COLOURS["good"]
    assert [text.get_text() for text in named.texts] == ["equal", "2.0"]
    assert counts.get_subplotspec().get_gridspec().get_height_ratios() == [2, 1, 1]


def test_a_function_of_a_kernel_file():
    text = read_function(PACKAGE / "kernels/cuda/ternary.cuh", "times_64")
    assert text in (PACKAGE / "kernels/cuda/ternary.cuh").read_text()
    assert text.startswith("/* Crumb i")
    assert text.rstrip().endswith("}")
    with pytest.raises(LookupError, match="no function nothing"):
        read_function(PACKAGE / "kernels/cuda/ternary.cuh", "nothing")


@pytest.mark.thorough
def test_a_server_for_a_cell_ends_with_it_even_when_it_fails():
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastjsonschema")
    urls = []

    def ask_and_fail():
        with run_server("--threads", "1", max_batch=2) as url:
            urls.append(url)
            body = json.dumps({"prompt": "Alice", "max_tokens": 3}).encode()
            asked = Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
            with urlopen(asked, timeout=20) as answer, urlopen(f"{url}/engine", timeout=20) as engine:
                assert json.load(answer)["usage"]["completion_tokens"] == 3
                told = json.load(engine)
            assert told["limits"]["max_batch"] == 2
            steps = [
                StepRecord(**{**step, "parts": [StepPart(*each) for each in step["parts"]]}) for step in told["steps"]
            ]
            assert [step.parts[0].kind for step in steps] == ["prefill", "decode", "decode"]
            assert len(timeline(steps, by_step=True).axes[0].patches) == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ask_and_fail()
    with pytest.raises(URLError):
        urlopen(urls[0], timeout=20)
    with pytest.raises(BackendUnavailable, match="not start: no-such-model: no such file"), run_server("no-such-model"):
        pytest.fail("it started")
