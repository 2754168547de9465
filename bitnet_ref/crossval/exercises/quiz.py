"""Quizzes: five questions for a lesson, of which each wrong choice says why it is wrong. Source: assets/exercises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .declare import Exercise, Wrong, add_exercise, read_texts

LETTERS = "abc"


@dataclass(frozen=True)
class Question:
    """text: ends with a question mark.   wrong: choice -> why it is wrong."""

    text: str
    right: str
    wrong: dict[str, str]

    @property
    def choices(self) -> list[str]:
        """In the order of the letters: by their texts."""
        return sorted([self.right, *self.wrong], key=str.lower)

    @property
    def letter(self) -> str:
        return LETTERS[self.choices.index(self.right)]


QUIZZES = {name: [Question(**each) for each in questions] for name, questions in read_texts("quiz.toml").items()}
HINTS = (
    "A wrong choice says why it is wrong: answer, and read.",
    "Each question is about a picture or an assert of this notebook.",
)


def judge_letters(lesson: str, answer: Any) -> str:
    """Raises Wrong, with the reason for each wrong choice. The letters may be a list, upper case, or
    have commas and numbers, as in "1a 2b"."""
    if not isinstance(answer, (str, list, tuple)):
        raise Wrong('Five letters are wanted, such as "abcab".')
    letters = [each for each in "".join(map(str, answer)).lower() if each.isalpha()]
    questions = QUIZZES[lesson]
    if len(letters) != len(questions) or not set(letters) <= set(LETTERS):
        raise Wrong(f"{len(questions)} letters of a, b and c are wanted.")
    reasons = []
    for number, (letter, question) in enumerate(zip(letters, questions, strict=True), start=1):
        choice = question.choices[LETTERS.index(letter)]
        if choice != question.right:
            reasons.append(f"{number}: {question.wrong[choice]}")
    if reasons:
        raise Wrong(f"{len(questions) - len(reasons)} of {len(questions)} are right. {' '.join(reasons)}")
    return "All five."


def declare(lesson: str) -> None:
    """Adds the quiz of a lesson to the exercises."""

    def judge(answer: Any) -> str:
        return judge_letters(lesson, answer)

    letters = "".join(question.letter for question in QUIZZES[lesson])
    add_exercise(Exercise(f"{lesson}.quiz", "quiz", judge, HINTS, f'quiz = "{letters}"', minutes=10))


for each in QUIZZES:
    declare(each)
