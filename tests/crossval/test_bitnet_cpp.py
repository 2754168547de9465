"""Greedy tokens of another program: driven through llama-cli's command line, in a process of its own."""

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import GOLDEN, model

from bitnet_ref.cli import cli
from bitnet_ref.crossval import cross_bitnet_cpp
from bitnet_ref.crossval.token_ids import compare_ids, compare_text
from bitnet_ref.formats.convert import gguf_tokenizer
from bitnet_ref.formats.gguf.export import write_gguf_model
from bitnet_ref.formats.open import ASSETS, open_checkpoint

PROMPT = "Once upon a time"

# A program with llama-cli's options: our own backend on the GGUF it is given, with a change that can be planted.
PROGRAM = """#!{python}
import argparse, sys
import bitnet_ref
parser = argparse.ArgumentParser()
parser.add_argument("-m"), parser.add_argument("-p"), parser.add_argument("-n", type=int)
parser.add_argument("--temp", type=float)
parser.add_argument("--no-display-prompt", action="store_true"), parser.add_argument("--ids", action="store_true")
parser.add_argument("--wrong-at", type=int), parser.add_argument("--die", action="store_true")
given = parser.parse_args()
assert given.temp == 0
print("main: loading " + given.m, file=sys.stderr)
if given.die:
    sys.exit("error: no such architecture")
model = bitnet_ref.load(given.m, backend="auto")
tokens = model.tokenizer.encode(given.p)
out = []
for i in range(given.n):
    logits = model.logits(tokens + out)[-1]
    best = int(logits.argmax())
    if i == given.wrong_at:  # the second best token
        logits[best] = -1e9
        best = int(logits.argmax())
    out.append(best)
start = len(model.tokenizer.decode(tokens))
text = model.tokenizer.decode(tokens + out)[start:]
if given.ids:
    print("tokens:", *out)
else:
    print(("" if given.no_display_prompt else " " + given.p) + text)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("bin") / "llama-cli"
    path.write_text(PROGRAM.replace("{python}", sys.executable))
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "storyteller.gguf"
    with open_checkpoint(ASSETS / "storyteller") as checkpoint:
        write_gguf_model(checkpoint, path, "i2_s", tokenizer=gguf_tokenizer(checkpoint))
    return path


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("prints", "options"),
    [("text", []), ("ids", ["--ids"])],
    ids=["text", "ids"],
)
def test_the_same_tokens(program, gguf, prints, options):
    crossing = cross_bitnet_cpp(gguf, program, prompt=PROMPT, count=4, prints=prints, options=options)
    assert crossing.agrees, crossing.verdict
    assert crossing.greedy.compared == 4
    assert crossing.verdict.startswith("AGREES: equal for 4 tokens, smallest margin")


@pytest.mark.thorough
@pytest.mark.parametrize("prints", ["text", "ids"])
def test_a_planted_token_is_named_with_its_margin(program, gguf, prints):
    options = ["--wrong-at", "2", *(["--ids"] if prints == "ids" else ["--no-display-prompt"])]
    crossing = cross_bitnet_cpp(gguf, program, prompt=PROMPT, count=4, prints=prints, options=options)
    assert crossing.agrees is False
    found = crossing.greedy
    assert found.parted == 2
    m = model(gguf)
    prompt = m.tokenizer.encode(PROMPT)
    mine = m.generate(prompt, max_tokens=2, temperature=0.0).token_ids
    last = sorted(m.logits([*prompt, *mine])[-1].tolist())
    assert found.margin == pytest.approx(last[-1] - last[-2], abs=1e-4)
    assert crossing.verdict.startswith("DIFFERS from token 2 on: ")
    if prints == "ids":
        assert found.behind == pytest.approx(found.margin)  # the second best token


def test_a_program_that_fails_or_is_not_there(program, gguf, tmp_path):
    crossing = cross_bitnet_cpp(gguf, program, prompt=PROMPT, count=2, options=["--die"])
    assert crossing.agrees is False
    assert "no such architecture" in crossing.verdict
    assert cross_bitnet_cpp(gguf, str(tmp_path / "llama-cli")).agrees is None
    no_tokenizer = cross_bitnet_cpp(GOLDEN / "llama-dense", program)
    assert no_tokenizer.agrees is None
    assert "cannot be converted for it" in no_tokenizer.verdict


@pytest.mark.thorough
def test_from_the_shell(program, gguf):
    arguments = ["crossval", "bitnet-cpp", str(gguf), program, "--prompt", PROMPT, "--max-tokens", "2", "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["results"][0]["greedy"]["compared"] == 2
    assert CliRunner().invoke(cli, [*arguments, "--options=--wrong-at 0 --no-display-prompt"]).exit_code == 1


def test_ends():
    m = model("storyteller")
    prompt = m.tokenizer.encode(PROMPT)
    mine = list(m.generate(prompt, max_tokens=4, temperature=0.0).token_ids)
    assert compare_ids(m, prompt, mine).agrees
    assert not compare_ids(m, prompt, []).agrees
    start = len(m.tokenizer.decode(prompt))
    text = m.tokenizer.decode([*prompt, *mine])[start:]
    assert compare_text(m, prompt, text + "\n", 4).agrees
    assert compare_text(m, prompt, text + " and more", 4).parted == 4
    short = compare_text(m, prompt, m.tokenizer.decode([*prompt, *mine[:2]])[start:], 4)
    assert short.parted == 2


def test_a_text_that_parts_at_a_near_tie_agrees():
    """As its ids do: an engine that rounds one activation the other way prints another text."""
    m = model("storyteller")
    prompt = m.tokenizer.encode("Once upon a time")
    best = list(m.generate(prompt, max_tokens=24, temperature=0.0).token_ids)
    second = int(np.argsort(m.logits([*prompt, best[0]])[-1])[-2])  # 0.08 behind the best
    ids = [best[0], second]
    ids += m.generate([*prompt, *ids], max_tokens=22, temperature=0.0).token_ids
    text = m.tokenizer.decode([*prompt, *ids])[len(m.tokenizer.decode(prompt)) :]
    for end in ("", "\n"):
        greedy = compare_text(m, prompt, text + end, 24)
        assert greedy.verdict.startswith("AGREES up to near ties: equal for 23 of 24 tokens"), greedy.verdict
    assert compare_text(m, prompt, text[:-20], 24).parted == 1
    assert compare_text(m, prompt, text + " and more", 24).parted == 1
