"""Judges a model's texts by rules: which sampling makes the better stories.

    python scripts/training/judge_texts.py --temperature 0 0.6 0.8 --top-p 1 0.9 --repetition-penalty 1 1.1

Forty prompts, each with a hero. For every setting of the grid a table's row says how many of the forty texts keep each
rule:

    repeats    no 8 words stand twice
    quotes     every speech that begins ends (the last paragraph's too, if a sentence followed)
    distinct   of each 50 words in a row at least 28 differ, on average
    ends       no sentence is longer than 45 words
    hero       the text names the hero of its prompt again

`--show N` prints the first texts of each row, for reading. The same seeds are taken for every setting.
"""

from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path
from typing import Any

import bitnet_ref

ANIMALS = "fox|rabbit|wolf|mouse|cat|dog|bear|crow|lion|frog"
PEOPLE = "king|queen|princess|boy|girl|giant|witch|farmer|tailor|miller"
STARTS = ("Once upon a time there was a {}", "The {} ran")
OTHERS = ("Long ago a {} lived", "The old {} said")
PROMPTS = [
    (start.format(hero), hero)
    for heroes, starts in ((ANIMALS, STARTS), (PEOPLE, OTHERS))
    for hero in heroes.split("|")
    for start in starts
]
RULES = ("repeats", "quotes", "distinct", "ends", "hero")
REPEATED, WINDOW, DISTINCT, LONGEST_SENTENCE = 8, 50, 28, 45


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+(?:'[a-z]+)?", text.lower())


def judge(text: str, hero: str) -> dict[str, bool]:
    """Which rules the text keeps.   text: the prompt and its continuation, which may end anywhere

    >>> judge("The fox ran. The hen was glad, and the fox went home.", "fox")["hero"]
    True
    >>> judge('The fox ran. "Stop said the hen. The fox went home.', "fox")["quotes"]
    False
    """
    words = words_of(text)
    phrases = [tuple(words[i : i + REPEATED]) for i in range(len(words) - REPEATED + 1)]
    windows = [len(set(words[i : i + WINDOW])) for i in range(len(words) - WINDOW + 1)]
    paragraphs = [p for p in text.split("\n") if p.strip()]
    last = paragraphs[-1]
    cut = bool(re.search(r'"[^".!?]*$', last))  # a speech of which the first sentence has not ended yet
    closed = [p.count('"') % 2 == 0 for p in paragraphs[:-1]] + [cut or last.count('"') % 2 == 0]
    return {
        "repeats": len(set(phrases)) == len(phrases),
        "quotes": all(closed),
        "distinct": not windows or sum(windows) / len(windows) >= DISTINCT,
        "ends": max(len(words_of(sentence)) for sentence in re.split(r"[.!?]", text)) <= LONGEST_SENTENCE,
        "hero": sum(word in (hero, hero + "'s") for word in words) > 1,
    }


def texts_of(model: Any, tokens: int, first_seed: int, **sampling: float) -> list[str]:
    """The forty texts of one setting."""
    texts = []
    for seed, (prompt, _) in enumerate(PROMPTS, first_seed):
        result = model.generate(prompt, max_tokens=tokens, seed=seed, **sampling)
        texts.append(model.tokenizer.decode([*result.prompt_token_ids, *result.token_ids]))  # with the space between
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="storyteller")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt; the next ones count on")
    grid = {"temperature": [0.0, 0.6, 0.8, 1.0], "top_p": [1.0], "min_p": [0.0], "repetition_penalty": [1.0]}
    for name, values in grid.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, nargs="+", default=values)
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print so many of a setting's texts")
    parser.add_argument("--out", type=Path, help="append the rows here too")
    args = parser.parse_args()
    model = bitnet_ref.load(args.model)
    names = list(grid)
    print(" ".join(f"{name:>11.11}" for name in names) + "".join(f"{rule:>9}" for rule in RULES) + "      all")
    for point in itertools.product(*(getattr(args, name) for name in names)):
        sampling = dict(zip(names, point, strict=True))
        texts = texts_of(model, args.tokens, args.seed, **sampling)
        verdicts = [judge(text, hero) for text, (_, hero) in zip(texts, PROMPTS, strict=True)]
        counts = [sum(verdict[rule] for verdict in verdicts) for rule in RULES]
        counts.append(sum(all(verdict.values()) for verdict in verdicts))
        row = " ".join(f"{value:11.2f}" for value in point) + "".join(f"{count:9}" for count in counts)
        print(row, flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(row + "\n")
        for text in texts[: args.show]:
            print(f"--\n{text}")


if __name__ == "__main__":
    main()
