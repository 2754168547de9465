"""Takes the plainest stories out of books: a text to train on, with what is plain first.

    python scripts/training/make_stories.py corpus/stories_train.txt.xz corpus/children_train.txt.xz \
        --held-out corpus/stories_val.txt.xz --out corpus/plain.txt

Books are divided at their headings. Each chapter, tale or fable becomes a document, without headings, verse, plays,
notes and front matter, with one form of quotes and dashes. One that stands in two files is taken once, one of the
held-out text not at all. What is left is ordered by reading level: words per sentence, and the share of words that are
not among the `COMMON` most frequent of the whole text. `--keep` drops the hardest. `--again` writes the plainest once
more, so that training sees them twice as often: a trainer that shuffles has no other curriculum.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from bitnet_ref.training.data import DOCUMENT_END, read_text

COMMON = 2000
MIN_CHARACTERS, MAX_HEADING = 400, 70
MIN_REPEATED = 60  # characters of a paragraph that is no phrase which any two books share
HEADING = re.compile(r"(chapter|part|book|section|volume|story the)\b|[ivxlc]+\.?\s|[ivxlc]+\.?$", re.IGNORECASE)
FRONT = re.compile(r"translat|illustrat|copyright|preface|contents|gutenberg|edition|dedicat|footnote", re.IGNORECASE)
SPEAKER = re.compile(r"[A-Z][A-Z .]{3,}\.\s")  # of a play
ODD = re.compile(r"[^\w\s.,;:!?'\"()&-]|_")
# Old books have such words; a paragraph with one is left out.
SLUR = re.compile(r"\b(niggers?|niggering|dark(y|ies)|injuns?|chinam[ae]n|squaws?)\b", re.IGNORECASE)
WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
QUOTED = re.compile(r"(^|(?<=[\s(]))'(?=\w)(.+?[,.!?;:-])'(?=\s|$|[);,.])")


@dataclass(frozen=True)
class Story:
    text: str
    words: int
    sentences: int
    rare: float  # share of the words
    level: float = 0.0


def normalized(paragraph: str) -> str:
    """One form of dashes and quotes: `--` without spaces, speech in double quotes."""
    text = " ".join(paragraph.split())
    text = re.sub(r"\s*-{2,}\s*", "--", text)
    return QUOTED.sub(r'\1"\2"', text) if '"' not in text else text


def is_heading(paragraph: str) -> bool:
    if len(paragraph) > MAX_HEADING or "\n" in paragraph:
        return False
    return paragraph.isupper() or bool(HEADING.match(paragraph)) or not re.search(r"[.!?:;,\"'-]$", paragraph)


def is_prose(paragraph: str) -> bool:
    lines = paragraph.split("\n")
    verse = len(lines) > 1 and statistics.mean(map(len, lines)) < 65
    return not (verse or SPEAKER.match(paragraph) or ODD.search(paragraph) or SLUR.search(paragraph))


def sections(text: str) -> list[list[str]]:
    """The paragraphs of each chapter or tale, as they stand."""
    result: list[list[str]] = []
    for book in filter(str.strip, text.split(DOCUMENT_END)):
        result.append([])
        for paragraph in filter(None, map(str.strip, book.split("\n\n"))):
            if not is_heading(paragraph):
                result[-1].append(paragraph)
            elif result[-1]:
                result.append([])
    return result


def stories_of(texts: list[str], held_out: str) -> list[str]:
    """The prose of every section that is new, of enough length, and mostly prose."""
    seen = {normalized(p) for p in held_out.split("\n\n") if len(p) >= MIN_REPEATED}
    stories = []
    for paragraphs in (part for text in texts for part in sections(text)):
        total = sum(map(len, paragraphs))
        prose = [normalized(p) for p in paragraphs if is_prose(p) and not (len(p) < 300 and FRONT.search(p))]
        long = [p for p in prose if len(p) >= MIN_REPEATED]
        repeated = sum(len(p) for p in long if p in seen)
        seen.update(long)
        size = sum(map(len, prose))
        if size >= MIN_CHARACTERS and size > 0.7 * total and repeated < 0.3 * size:
            stories.append("\n\n".join(prose))
    return stories


def by_level(texts: list[str]) -> list[Story]:
    """Plainest first: the sum of both measures, each in its standard deviations."""
    counts = Counter(word for text in texts for word in WORD.findall(text.lower()))
    common = {word for word, _ in counts.most_common(COMMON)}
    stories = []
    for text in texts:
        words = WORD.findall(text.lower())
        sentences = len(re.findall(r"[.!?]+[\"']?(?=\s|$)", text)) or 1
        stories.append(Story(text, len(words), sentences, sum(w not in common for w in words) / max(1, len(words))))
    lengths, rare = [story.words / story.sentences for story in stories], [story.rare for story in stories]
    scale = statistics.pstdev(lengths) or 1.0, statistics.pstdev(rare) or 1.0
    levels = [length / scale[0] + share / scale[1] for length, share in zip(lengths, rare, strict=True)]
    leveled = [Story(s.text, s.words, s.sentences, s.rare, level) for s, level in zip(stories, levels, strict=True)]
    return sorted(leveled, key=lambda story: story.level)


def plainest(stories: list[Story], share: float) -> list[Story]:
    """The first of them, up to that share of all characters."""
    ends = accumulate(len(story.text) for story in stories)
    characters = sum(len(story.text) for story in stories)
    return [story for story, end in zip(stories, ends, strict=True) if end <= share * characters]


def describe(name: str, stories: list[Story]) -> str:
    words = sum(story.words for story in stories)
    length, rare = words / sum(s.sentences for s in stories), sum(s.rare * s.words for s in stories) / words
    size = sum(len(story.text) for story in stories) / 1e6
    level = f"{length:5.1f} words/sentence {rare:6.1%} rare"
    return f"{name:10} {len(stories):5} stories {size:6.2f} M characters {level}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--held-out", type=Path, help="a text of which nothing may be taken")
    parser.add_argument("--keep", type=float, default=0.8, help="share of the characters, plainest first")
    parser.add_argument("--again", type=float, default=0.25, help="share of what is kept that is written twice")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    held_out = read_text(args.held_out) if args.held_out else ""
    every = by_level(stories_of([read_text(path) for path in args.texts], held_out))
    if not every:
        parser.error("there is no prose in these texts")
    kept = plainest(every, args.keep)
    again = plainest(kept, args.again)
    for name, stories in (("all", every), ("kept", kept), ("twice", again), ("dropped", every[len(kept) :])):
        if stories:
            print(describe(name, stories))
    args.out.write_text(DOCUMENT_END.join(story.text for story in again + kept) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
