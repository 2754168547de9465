"""Dialogues from the speech of story books, as token ids to train a chat model on.

    python scripts/training/make_dialogues.py corpus/stories_train.txt.xz corpus/children_train.txt.xz \
        --tokenizer storyteller/model --out corpus/dialogues.npy

In a book each speaker has a paragraph: what is in quotes there is a turn, and paragraphs that follow each other are a
conversation. The narration before it, if it is short, is the scene, which the model gets as its system message. The
turns are written by the chat template of storychat, so that the model sees in chats what it was trained on.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from make_stories import SLUR

from bitnet_ref.formats.open import ASSETS
from bitnet_ref.system.atomic import atomic_path
from bitnet_ref.tokenizers import load_tokenizer
from bitnet_ref.training.data import DOCUMENT_END, read_text

TEMPLATE = (ASSETS / "storychat" / "chat_template.jinja").read_text().strip()
MOST_WORDS, MOST_SCENE_WORDS, MOST_TURNS = 40, 40, 8


def speech_of(paragraph: str) -> str | None:
    """What is said in a paragraph, without "said he"; None if nothing is, or much else is told."""
    pieces = re.findall(r'"([^"]+)"', paragraph)
    words = sum(len(piece.split()) for piece in pieces)
    told = len(re.sub(r'"[^"]*"', "", paragraph).split())
    if not pieces or paragraph.count('"') % 2 or told > 25 or not 1 <= words <= MOST_WORDS:
        return None
    joined = pieces[0].strip()
    for piece in map(str.strip, pieces[1:]):  # "Yes," said he. "Come in." -> Yes. Come in.
        if piece[:1].isupper() and joined.endswith(","):
            joined = joined[:-1] + "."
        joined += " " + piece
    joined = joined[:-1] + "." if joined.endswith((",", ";", "-")) else joined
    return " ".join(joined.replace("_", "").split()) or None


def dialogues_of(document: str) -> Iterator[tuple[str | None, list[str]]]:
    """(scene, turns) of each conversation of at least two turns."""
    scene: str | None = None
    turns: list[str] = []
    for paragraph in [*(" ".join(text.split()) for text in document.split("\n\n")), ""]:
        if SLUR.search(paragraph):
            paragraph = ""
        speech = speech_of(paragraph)
        if speech is not None:
            turns.append(speech)
        if speech is None or len(turns) == MOST_TURNS:
            if len(turns) > 1:
                yield scene, turns
            turns, scene = [], None
        if speech is None and '"' not in paragraph and 5 <= len(paragraph.split()) <= MOST_SCENE_WORDS:
            scene = paragraph


def messages_of(scene: str | None, turns: Sequence[str]) -> list[dict[str, str]]:
    """The last turn is the assistant's."""
    roles = ("assistant", "user")
    spoken = [{"role": roles[(len(turns) - 1 - i) % 2], "content": turn} for i, turn in enumerate(turns)]
    return [{"role": "system", "content": scene}, *spoken] if scene else spoken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("books", type=Path, nargs="+", help="texts as `bitnet-ref train` reads them")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a folder")
    parser.add_argument("--out", type=Path, required=True, help="the .npy to write")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.tokenizer)
    drawn = [item for book in args.books for text in read_text(book).split(DOCUMENT_END) for item in dialogues_of(text)]
    unique = list(dict.fromkeys((scene, tuple(turns)) for scene, turns in drawn))
    options = {"add_generation_prompt": False, "tokenize": True, "chat_template": TEMPLATE}
    ids = np.concatenate([tokenizer.apply_chat_template(messages_of(*each), **options) for each in unique])
    with atomic_path(args.out) as target, open(target, "wb") as file:
        np.save(file, ids.astype(np.uint16))
    print(f"{args.out}: {len(unique):,} dialogues, {len(ids):,} tokens")


if __name__ == "__main__":
    main()
