"""What a stranger sends as a guide is compiled by a process that may die of it."""

import os
import signal
import threading
from pathlib import Path

import pytest

import bitnet_ref
from bitnet_ref.errors import GenerationError, OutOfMemory, RequestTimeout
from bitnet_ref.generation import guide_helper, guide_prover
from bitnet_ref.generation.params import SamplingParams

pytest.importorskip("llguidance")
pytestmark = pytest.mark.skipif(os.name == "nt", reason="no limits on a process there")


@pytest.fixture(scope="module")
def vocabulary():
    return bitnet_ref.load("storyteller").vocabulary


@pytest.fixture
def prover(monkeypatch):
    prover = guide_prover.Prover()
    monkeypatch.setattr(guide_prover, "_prover", prover)
    yield prover
    prover.stop()


def prove(vocabulary, **guide):
    guide_prover.prove_guide(SamplingParams(**guide), vocabulary)


SLOW = {"allOf": [{"type": "integer", "multipleOf": factor} for factor in (9973, 9967)]}


def test_a_good_guide_is_proven_once(vocabulary, prover):
    for _ in range(3):
        prove(vocabulary, guided_regex="[0-9]+")
    prove(vocabulary)
    assert prover.compiled == 1


def test_a_guide_with_a_long_text_is_proven(vocabulary, prover):
    """Each step splits the text that is left into tokens."""
    prove(vocabulary, guided_choice=["The rabbit looked at his watch, and hurried on. " * 25])


@pytest.mark.thorough
def test_bad_guides_of_every_kind_are_the_requests_own_error(vocabulary, prover):
    for guide in (
        {"guided_json": {"type": "nothing"}},
        {"guided_regex": "("},
        {"guided_grammar": "start: a"},
        {"guided_choice": [f"{number:x}" for number in range(12_000)]},
    ):
        with pytest.raises(GenerationError) as caught:
            prove(vocabulary, **guide)
        assert caught.value.field == next(iter(guide))
    assert prover.compiled >= 3
    with pytest.raises(GenerationError, match=r"oneOf constraints are not supported\. Write anyOf$"):
        prove(vocabulary, guided_json={"oneOf": [{"type": "integer"}, {"type": "number"}]})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "value"),
    [("CPU_S", 0.3), ("MEMORY_BYTES", 1 << 22), ("STACK_BYTES", 1 << 16)],
    ids=["time", "memory", "stack"],
)
def test_a_guide_that_ends_the_helper_is_refused_and_the_next_one_is_proven(
    vocabulary, prover, monkeypatch, tmp_path, name, value
):
    source = Path(guide_helper.__file__).read_text(encoding="utf-8")
    line = next(line for line in source.splitlines() if line.startswith(f"{name} = "))
    copy = tmp_path / "helper.py"
    copy.write_text(source.replace(line, f"{name} = {value}"), encoding="utf-8")
    chain = "start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(1900)) + '\na1900: "x"'
    guide = {"STACK_BYTES": {"guided_grammar": chain}}.get(name, {"guided_json": SLOW})
    with monkeypatch.context() as patch:
        patch.setattr(guide_helper, "__file__", str(copy))
        for _ in range(2):  # the second time it is remembered
            with pytest.raises(GenerationError, match="compiling it takes more than"):
                prove(vocabulary, **guide)
        assert prover.compiled == 1
    prove(vocabulary, guided_regex="[a-z]+")
    assert prover.compiled == 2


def test_a_helper_that_was_killed_is_started_again(vocabulary, prover):
    prove(vocabulary, guided_regex="x+")
    for helper in prover._free:
        if helper._process is not None:
            os.kill(helper._process.pid, signal.SIGKILL)
            helper._process.wait()
    prove(vocabulary, guided_regex="y+")


def test_a_machine_that_stands_still_says_nothing_about_the_guide(vocabulary, prover, monkeypatch):
    prove(vocabulary, guided_regex="s+")
    (helper,) = [each for each in prover._free if each._process is not None]
    os.kill(helper._process.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(guide_prover, "WALL_S", 0.1)
        with pytest.raises(RequestTimeout, match="is the machine busy"):
            prove(vocabulary, guided_regex="t+")
    prove(vocabulary, guided_regex="t+")


@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_helper_that_others_kill_says_nothing_about_the_guide(vocabulary, prover, monkeypatch, tmp_path, number):
    """The system kills it first where memory is short; a guide must not be refused for that, now or later."""
    source, compiles = Path(guide_helper.__file__).read_text(encoding="utf-8"), "    matcher = in_thread("
    copy = tmp_path / "helper.py"
    copy.write_text(source.replace(compiles, f"    os.kill(os.getpid(), {number:d})\n{compiles}"), encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setattr(guide_helper, "__file__", str(copy))
        with pytest.raises(OutOfMemory, match="is memory short"):
            prove(vocabulary, guided_regex="k+")
        assert prover.compiled == 0
    with monkeypatch.context() as patch:
        patch.setattr(guide_prover.subprocess, "Popen", lambda *_, **__: os.open("/nowhere/at/all", 0))
        with pytest.raises(OutOfMemory, match="could be started"):
            prove(vocabulary, guided_regex="k+")
    prove(vocabulary, guided_regex="k+")


def test_a_forked_child_has_helpers_of_its_own(vocabulary):
    prove(vocabulary, guided_regex="z+")
    child = os.fork()
    if child == 0:
        try:
            prove(vocabulary, guided_regex="[z]+")
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    prove(vocabulary, guided_regex="[z][z]+")


@pytest.mark.thorough
def test_two_vocabularies_and_several_threads(vocabulary, prover):
    other, errors = bitnet_ref.load("storychat").vocabulary, []

    def work(number):
        try:
            prove((vocabulary, other)[number % 2], guided_regex=f"[0-9]{{{number % 5 + 1}}}")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(prover._free) == guide_prover.HELPERS


def test_a_step_that_takes_long_ends_its_own_request(monkeypatch):
    from bitnet_ref.generation import constraints

    monkeypatch.setattr(constraints, "STEP_S", -1.0)
    with pytest.raises(GenerationError, match="a step took"):
        bitnet_ref.load("storyteller").generate("Once", guided_regex="[a-z]+", max_tokens=2)
