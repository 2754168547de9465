"""The text of a reply as events: first the thinking, where the model's template has a place for it, then the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...reference.layers import Floats
from .events import Event, Reasoning, Text, merge_events
from .tools import InputReader, ToolReader


@dataclass(frozen=True)
class ThinkingMarks:
    """What is around the thinking. begins_inside: the prompt has the first mark already."""

    start: str
    end: str
    begins_inside: bool = False


KNOWN_MARKS = (
    ThinkingMarks("<think>", "</think>"),
    ThinkingMarks("[THINK]", "[/THINK]"),  # Mistral
    ThinkingMarks("<|thought_start|>", "<|thought_end|>"),  # MiniCPM 3
    ThinkingMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    ThinkingMarks("<seed:think>", "</seed:think>"),
)


def find_thinking(template: str, prompt: str) -> ThinkingMarks | None:
    """The marks that a chat template contains, and where the prompt that it wrote ends. None: it has no thinking."""
    for marks in KNOWN_MARKS:
        if marks.end in template:
            return ThinkingMarks(marks.start, marks.end, prompt.rstrip().endswith(marks.start))
    return None


class ReplyReader:
    """Reads the text of one reply, piece by piece."""

    def __init__(self, thinking: ThinkingMarks | None = None, tools: ToolReader | InputReader | None = None) -> None:
        self._thinking, self._tools = thinking, tools
        self._pending = ""
        self._spaces: list[str] = []  # at the end of the thinking
        is_inside = thinking is not None and thinking.begins_inside
        self._state = "answer" if thinking is None else "thinking" if is_inside else "start"
        self._strips = is_inside  # spaces between the thinking and the answer

    def copy(self) -> ReplyReader:
        """A reader for another reply."""
        return ReplyReader(self._thinking, None if self._tools is None else self._tools.copy())

    def push(self, text: str, finish: str | None) -> list[Event]:
        """Add text. finish: why the reply ended, with its last piece.   -> what is certain now"""
        events: list[Event] = []
        if self._state != "answer":
            text, self._pending = self._pending + text, ""
        if self._state == "start":
            text = self._start(text, finish)
        if self._state == "thinking":
            text = self._think(text, finish, events)
        if self._state == "answer":
            if self._strips:
                text = text.lstrip()
                self._strips = not text
            if self._tools is not None:
                events += self._tools.push(text, finish)
            elif text:
                events.append(Text(text))
        elif finish is not None and self._tools is not None:
            events += self._tools.push("", finish)
        return merge_events(events)

    def _start(self, text: str, finish: str | None) -> str:
        assert self._thinking is not None
        solid, mark = text.lstrip(), self._thinking.start
        if solid.startswith(mark):
            self._state, self._strips = "thinking", True
            return solid[len(mark) :]
        if mark.startswith(solid) and finish is None:
            self._pending = text
            return ""
        self._state = "answer"
        return text

    def _think(self, text: str, finish: str | None, events: list[Event]) -> str:
        """-> what follows the thinking"""
        assert self._thinking is not None
        start, end = self._thinking.start, self._thinking.end
        if self._strips:  # a model may write the mark that its prompt had
            text = text.lstrip()
            if finish is None and start.startswith(text):
                self._pending = text
                return ""
            text = text.removeprefix(start).lstrip()
            self._strips = not text
        place = text.find(end)
        if place < 0 and finish is None:
            hold = next((n for n in range(min(len(text), len(end) - 1), 0, -1) if text.endswith(end[:n])), 0)
            text, self._pending = text[: len(text) - hold], text[len(text) - hold :]
        thought = text if place < 0 else text[:place]
        if solid := thought.rstrip():
            events.append(Reasoning("".join([*self._spaces, solid])))
            self._spaces = []
        self._spaces.append(thought[len(solid) :])
        if place < 0:
            return ""
        self._state, self._strips = "answer", True
        return text[place + len(end) :]


def keep_only(ids: NDArray[np.int64] | int, logits: Floats) -> Floats:
    """The logits in which all tokens but these are impossible."""
    kept = np.full_like(logits, -np.inf)
    kept[ids] = logits[ids]
    return kept


class ThinkingBudget:
    """A processor (see `generation.processors`) that ends the thinking after `budget` tokens.

    It makes the tokens of the end mark the only ones possible, one after the other. A reply that has not begun to think
    by its second token is left alone.
    """

    def __init__(self, prompt_tokens: int, budget: int, start: list[int], end: list[int]) -> None:
        """start: ids of the mark that the reply has to begin with; [] if it begins inside. end: of the end mark."""
        self._first, self._start, self._end = prompt_tokens, start, end
        self._limit = budget + len(start)

    def __call__(self, token_ids: NDArray[np.int64], logits: Floats) -> Floats:
        done = len(token_ids) - self._first - self._limit
        if not 0 <= done < len(self._end):
            return logits
        new = token_ids[self._first :].tolist()
        if new[: len(self._start)] != self._start or new[self._limit :] != self._end[:done]:
            return logits
        if any(new[place : place + len(self._end)] == self._end for place in range(self._limit - len(self._end) + 1)):
            return logits
        return keep_only(self._end[done], logits)
