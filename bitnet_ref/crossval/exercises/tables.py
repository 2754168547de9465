"""Judges that are tables: of numbers, a word or a set, whose mistakes stand in `assets/exercises` beside the hints."""

from __future__ import annotations

from typing import Any

import numpy as np

from .answers import as_array, expect_array, expect_number, expect_set, expect_word
from .declare import exercise, exercise_texts


def judged_by_table(name: str) -> None:
    """Declares the exercise `name` of `assets/exercises`, of which the right answer is that of its solution.

    There `mistakes` are sentence -> the numbers that are wrong so, and `hint` is said of all others; a right number may
    be off by `within`. Of a list of numbers, in any order, they are lists. With `stems`, as a word of a right answer
    begins, they are sentence -> stems. A set has `choices` instead: all of them, and why each is a member or is none.
    `right`: what is said of a right answer.
    """
    text = exercise_texts()[name]

    @exercise(name)
    def judge(answer: Any) -> str:
        if "stems" in text:
            expect_word(answer, text["stems"], text["mistakes"], text["hint"])
            return str(text["right"])
        solution: dict[str, Any] = {}
        exec(text["solution"], solution)
        right = solution[text["answer"]]
        if "choices" in text:
            expect_set(answer, right, text["choices"])
        elif isinstance(right, list):
            expect_array(np.sort(as_array(answer).ravel()), right, mistakes=text["mistakes"])
        else:
            expect_number(answer, right, within=text.get("within", 0), mistakes=text["mistakes"], hint=text["hint"])
        return str(text["right"])
