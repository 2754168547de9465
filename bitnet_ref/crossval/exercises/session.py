"""`check = Check(model, ids)`: judges answers as they are given, tells hints one at a time, and keeps the progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...api import Model
from ...errors import ConfigError, count_of
from ...system.options import suggest
from .declare import EXERCISES, Exercise, Unanswered, Wrong
from .lessons import transformer
from .tensors import expect_tensor

RIGHT, OPEN, WRONG = "right", "open", "wrong"


@dataclass(frozen=True)
class Answered:
    """The judgement on one answer. status: RIGHT, OPEN (not answered) or WRONG.   hints: what `hint()` tells next."""

    name: str
    status: str
    text: str
    hints: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


class Check:
    """Judges the answers of one notebook against the reference.

    `check("1.2", answer)` judges an exercise, `check("blocks.0.attn.hook_q", q)` a tensor of the model's run on
    `tokens`; both print what they find. `check.hint()` tells the next hint on the answer that was judged last.
    """

    def __init__(self, model: Model | None = None, tokens: Sequence[int] = ()) -> None:
        self.model, self.tokens = model, list(tokens)
        self.recorded = {} if model is None or not tokens else dict(model.run_with_cache(self.tokens)[1])
        self.answers: dict[str, Answered] = {}
        self.attempts: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self._last = ""
        self._pieces: dict[str, Any] = {"np": np} | ({} if model is None else transformer.sizes(model))

    def __call__(self, name: str, answer: Any, **given: Any) -> None:
        """Judge an answer and print the result. given: what the exercise needs to know of the notebook."""
        print(self._note(self.judge(name, answer, **given)))

    def judge(self, name: str, answer: Any, **given: Any) -> Answered:
        """The judgement alone. Does not count as an attempt."""
        name = str(name)  # 1.2 is meant for "1.2"
        exercise = EXERCISES.get(name)
        try:
            if answer is None:
                raise Unanswered
            if exercise is None:
                if self.model is None or not self.recorded:
                    known = ", ".join(sorted(EXERCISES))
                    raise Wrong(f"{name!r} is no exercise ({known}), and a tensor needs Check(model, tokens).")
                text = expect_tensor(self.model, self.tokens, self.recorded, name, answer, **given)
            else:
                text = self._judge_exercise(exercise, answer, given)
            return Answered(name, RIGHT, f"right. {text}".rstrip())
        except Unanswered:
            return Answered(name, OPEN, self._how_to_begin(exercise), exercise.hints if exercise else ())
        except Wrong as wrong:
            return Answered(name, WRONG, f"not right yet. {wrong}", wrong.hints + (exercise.hints if exercise else ()))

    def use(self, name: str, answer: Any, **given: Any) -> Any:
        """Judge an answer that the rest of the notebook uses. Returns it if it is right, and otherwise the reference's
        own, so that the notebook goes on. It calls no function of the student's. Raises ConfigError for a name of no
        exercise."""
        if (exercise := EXERCISES.get(str(name))) is None:
            raise ConfigError(f"there is no such exercise; {suggest(str(name), EXERCISES)}", field=str(name))
        answered = self._note(self.judge(name, answer, **given))
        print(answered if answered.status == RIGHT else f"{answered} The notebook goes on with ours.")
        self._pieces |= given  # what the solution is made of
        exec(exercise.solution, self._pieces)
        ours = self._pieces[exercise.answer]
        if answered.status != RIGHT:
            return ours
        return np.asarray(answer).astype(ours.dtype) if isinstance(ours, np.ndarray) else answer  # a list is no array

    def hint(self, name: str | None = None) -> None:
        """Print the next hint on an exercise; by default on the one that was judged last."""
        name = name or self._last
        answered = self.answers.get(name)
        if answered is None:
            print("Run a cell with a check first, then ask for a hint.")
            return
        if answered.status == RIGHT:
            print(f"{name} is right: it needs no hint.")
            return
        told = self._told.get(name, 0)
        if told >= len(answered.hints):
            print(f"{name}: there is no further hint. " * bool(answered.hints) or f"{name}: there is no hint.")
            return
        self._told[name] = told + 1
        print(f"{name}, hint {told + 1} of {len(answered.hints)}: {answered.hints[told]}")

    def progress(self) -> None:
        """Print what is right, and what is not yet."""
        exercises = {name: each for name, each in self.answers.items() if name in EXERCISES}
        done = sum(each.status == RIGHT for each in exercises.values())
        print(f"{done} of {len(exercises)} exercises are right.")
        for name, each in exercises.items():
            tries = self.attempts.get(name, 0)
            counted = f", {tries} {'try' if tries == 1 else 'tries'}" if tries else ""
            told = f", {self._told[name]} hints" if self._told.get(name) else ""
            print(f"  {name:12} {each.status}{counted}{told}")

    def _judge_exercise(self, exercise: Exercise, answer: Any, given: dict[str, Any]) -> str:
        if self.model is not None:
            given = {"model": self.model, "tokens": self.tokens, "recorded": self.recorded, **given}
        wanted = exercise.judge.__code__.co_varnames[1 : exercise.judge.__code__.co_argcount]
        with np.errstate(all="ignore"):
            return exercise.judge(answer, **{name: value for name, value in given.items() if name in wanted}) or ""

    def _note(self, answered: Answered) -> Answered:
        """Remember an answer."""
        self._last = answered.name
        previous = self.answers.get(answered.name)
        if answered.status == WRONG and previous is not None and previous.hints != answered.hints:
            self._told.pop(answered.name, None)  # another mistake has hints of its own
        self.answers[answered.name] = answered
        if answered.status != OPEN:
            self.attempts[answered.name] = self.attempts.get(answered.name, 0) + 1
        return answered

    @staticmethod
    def _how_to_begin(exercise: Exercise | None) -> str:
        if exercise is None:
            return "not answered yet: it is None."
        return f"not answered yet. check.hint() gives the first of {count_of(len(exercise.hints), 'hint')}."
