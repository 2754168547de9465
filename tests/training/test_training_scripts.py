"""scripts/training: the stories that are taken out of books, and the rules by which texts are judged."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts" / "training"
COLOURS, THINGS = ("red", "blue", "green"), ("hens", "corn", "rain")
BOOK = f"""PREFACE

This book was translated from another one, and here is what the translator says.

CHAPTER I. The Fox

{"The fox ran to the old man and said, 'Give me a hen,' and the man gave him a red hen. " * 8}

The hen sang
    of corn and the sun
    and of grapes

Then the fox -- went home. He was glad --very glad.

{"The fox saw the cat. The cat saw him. " * 8}

He met a squaw, who was not corn.

CHAPTER II. The Cat

{"Notwithstanding innumerable embarrassments, perambulating philosophers contemplated magnificent architecture " * 5}.
"""


@pytest.fixture(scope="module")
def make_stories():
    return runpy.run_path(str(SCRIPTS / "make_stories.py"))


def test_the_plainest_stories(make_stories, tmp_path, monkeypatch, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(BOOK)
    out = tmp_path / "out.txt"
    arguments = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt"), "--out", str(out), "--keep", "1", "--again", "0.8"]
    monkeypatch.setattr(sys, "argv", ["make_stories.py", *arguments])
    make_stories["main"]()
    first, again, hard = out.read_text().split("\n\n\n")
    assert first == again  # the plain one twice; of the second file nothing, it is the first
    assert 'said, "Give me a hen," and' in first
    assert "He was glad--very glad." in first
    assert not any(word in first for word in ("corn", "translat", "CHAPTER", "squaw"))
    assert hard.startswith("Notwithstanding")
    assert "twice          1 stories" in capsys.readouterr().out
    held_out = tmp_path / "held_out.txt"
    held_out.write_text(first)
    assert len(make_stories["stories_of"]([BOOK], held_out.read_text())) == 1


def test_dialogues(make_stories, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    dialogues_of = runpy.run_path(str(SCRIPTS / "make_dialogues.py"))["dialogues_of"]
    book = '{}\n\n"Come in," said he. "Sit down."\n\n"Thank you."\n\nHe sat down.'
    turns = ["Come in. Sit down.", "Thank you."]
    assert list(dialogues_of(book.format("It rained on the old house."))) == [("It rained on the old house.", turns)]
    assert list(dialogues_of(book.format("The squaw came to the old house."))) == [(None, turns)]
    assert list(dialogues_of(book.format("").replace("you", "you, squaw"))) == []


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ('The fox ran. "Stop!" said the hen. The fox went home.', set()),
        ('The fox ran. The fox said, "Wait for', set()),  # the text was cut there
        ('The fox ran. The fox said, "Wait.\n\nHe ran on.', {"quotes"}),
        ("The fox ran. The hen sang.", {"hero"}),
        ("The fox ran. " + "The fox ran to the hen and the hen ran. " * 2, {"repeats"}),
        (
            "The fox met " + " ".join(f"{a} and {b} or {c}" for a in COLOURS for b in THINGS for c in "xyz") + " fox",
            {"distinct", "ends"},
        ),
        ("The fox is a fox. " * 40, {"repeats", "distinct"}),
    ],
)
def test_rules_for_texts(text, broken):
    judge = runpy.run_path(str(SCRIPTS / "judge_texts.py"))["judge"]
    assert {rule for rule, kept in judge(text, "fox").items() if not kept} == broken
