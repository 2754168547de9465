"""The shipped chat model: it answers, ends its answers, and knows dialogues better than storyteller does."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers import model

import bitnet_ref
from bitnet_ref.cli import cli

DIALOGUE = [
    {"role": "system", "content": "The old king sat by the fire with his daughter."},
    {"role": "user", "content": "Are you afraid of the dragon?"},
    {"role": "assistant", "content": "No, father, I am not afraid of him."},
    {"role": "user", "content": "Then you shall go with me in the morning."},
    {"role": "assistant", "content": "I will go with you."},
]


def test_a_conversation_is_the_same_on_every_backend(backend_name):
    session = model("storychat", backend_name).chat(DIALOGUE[0]["content"], max_tokens=40)
    replies = [session.send(question) for question in ("Will you come with me?", "Where is your mother?")]
    assert [reply.finish_reason for reply in replies] == ["stop", "stop"]
    assert all(reply.text[:1].isupper() and "Assistant" not in reply.text for reply in replies)
    reference = model("storychat", "numpy")
    for reply in replies:
        assert reply.token_ids == reference.generate(reply.prompt_token_ids, max_tokens=40).token_ids


def test_the_conversation_of_the_guide(capsys):
    """The answers that docs/using.md shows beside its code are those that it prints."""
    guide = (Path(__file__).parents[1] / "docs" / "using.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(model = bitnet_ref\.load\(\"storychat.*?)^```", guide, re.DOTALL | re.MULTILINE)
    exec(compile(code, "using.md", "exec"), {"bitnet_ref": bitnet_ref})
    shown = re.findall(r"  # ([A-Z].*)$", code, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == shown
    assert len(shown) == 2


def test_the_first_conversation_of_the_guide():
    """docs/using.md shows what `bitnet-ref chat` prints, and the other pages begin with the same question."""
    root = Path(__file__).parents[1]
    guide = (root / "docs" / "using.md").read_text(encoding="utf-8")
    command, talk = re.search(r"^\$ bitnet-ref (chat .*)\n((?:> .*\n.*\n)+)```", guide, re.MULTILINE).groups()
    lines = talk.splitlines()
    result = CliRunner().invoke(cli, command.split(), input="".join(f"{line[2:]}\n" for line in lines[::2]))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == lines[1::2]
    first = lines[0][2:]
    for path in ("README.md", "docs/serving.md", "bitnet_ref/assets/page/index.html"):
        assert first in (root / path).read_text(encoding="utf-8"), path
    assert first in " ".join(CliRunner().invoke(cli, ["chat", "--help"]).output.split())


def test_it_has_learned_dialogues():
    chat, story = model("storychat"), model("storyteller")
    ids = chat.tokenizer.apply_chat_template(DIALOGUE, add_generation_prompt=False, tokenize=True)
    ours, theirs = (sum(m.score(ids[:1], [ids[1:]])[0].logprobs) / (len(ids) - 1) for m in (chat, story))
    assert ours > theirs + 0.5


@pytest.mark.parametrize("message", ["Good morning!", '{"content": "Where do you live?"}'])
def test_the_shell_talks_with_it(message):
    options = ["--json", "--max-tokens", "30", "--backend", "numpy", "--temperature", "0"]
    result = CliRunner().invoke(cli, ["chat", *options], input=f"{message}\n")
    assert result.exit_code == 0, result.output
    reply = json.loads(result.stdout)
    assert reply["text"]
    assert reply["finish_reason"] == "stop"
