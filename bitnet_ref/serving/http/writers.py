"""How an API writes a reply: `Writer` is what all have in common, `OpenAIWriter` is for chats and completions.

`BlockWriter` is for APIs whose replies are lists of blocks, of which one is open at a time: thinking, text, calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...generation.results import Generation, StreamChunk
from .choices import Choice, usage
from .events import CallStart, Event, Reasoning, Text
from .shapes import Asked

SSE = "text/event-stream; charset=utf-8"
EMPTY: Mapping[str, Any] = {}


def write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Writer:
    """Writes one response. quiet: what a stream without news sends, so that a proxy keeps it open."""

    media_type = SSE
    quiet = ": waiting\n\n"

    def __init__(self, asked: Asked, choices: Sequence[Choice]) -> None:
        self.asked, self.choices = asked, choices

    def opening(self) -> str:
        """What a stream begins with, once its first chunk is there."""
        return ""

    def part(self, choice: Choice, chunk: StreamChunk) -> Any:
        """What a chunk says; None: nothing yet. It may run in a thread."""
        raise NotImplementedError

    def text(self, part: Any) -> str:
        """The part as the stream writes it."""
        return str(part)

    def closing(self) -> str:
        """What a stream ends with."""
        return ""

    def failure(self, status: int, facts: Mapping[str, Any]) -> str:
        """The end of a stream that failed. facts: as of `describe_failure`."""
        raise NotImplementedError

    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        """The response that is no stream."""
        raise NotImplementedError


class OpenAIWriter(Writer):
    """For chats and completions, with any number of texts."""

    def opening(self) -> str:
        facts = self.choices[0].prompt_facts()
        openings = [choice.opening() for choice in self.choices if self.asked.is_chat]
        return "".join(self.text(each, facts) for each in openings)

    def part(self, choice: Choice, chunk: StreamChunk) -> Any:
        return choice.part(chunk)

    def text(self, part: Any, facts: Mapping[str, Any] = EMPTY) -> str:
        asked = self.asked
        so_far = usage(asked, self.choices) if asked.usage_in_chunks else None
        counts = {"usage": so_far} if asked.usage_in_stream else {}
        return self._event({**asked.frame([part], is_chunk=True), **facts, **counts})

    def closing(self) -> str:
        end = ""
        if self.asked.usage_in_stream:
            frame = self.asked.frame([], is_chunk=True)
            end = self._event({**frame, "usage": usage(self.asked, self.choices)})
        return end + "data: [DONE]\n\n"

    def failure(self, status: int, facts: Mapping[str, Any]) -> str:
        return self._event(facts) + "data: [DONE]\n\n"

    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        return self.asked.response(self.choices, results)

    def _event(self, value: Mapping[str, Any]) -> str:
        return f"data: {write_json(value)}\n\n"


@dataclass
class Block:
    """A part of a reply. kind: "reasoning", "text" or "call". text: of a call, the JSON of its arguments."""

    kind: str
    index: int
    name: str = ""
    call_id: str = ""
    text: str = ""
    is_complete: bool = False

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Of a call; None where it was cut, or its JSON is wrong."""
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


class BlockWriter(Writer):
    """For one text. Subclasses say what the beginning, a piece and the end of a block look like."""

    def __init__(self, asked: Asked, choices: Sequence[Choice]) -> None:
        super().__init__(asked, choices)
        self.choice = choices[0]
        self.blocks: list[Block] = []
        self.finish: str | None = None  # as OpenAI writes it, at the end
        self.stop: str | int | None = None

    def open_block(self, block: Block) -> str:
        return ""

    def add_text(self, block: Block, text: str) -> str:
        return ""

    def close_block(self, block: Block) -> str:
        return ""

    def part(self, choice: Choice, chunk: StreamChunk) -> str | None:
        text = self.take(choice.read(chunk))
        self._note_end(chunk.finish_reason, chunk.stop_reason)
        return text + (self.end_blocks() if self.finish else "") or None

    def take(self, events: Sequence[Event]) -> str:
        """Add events to the blocks.   -> what a stream writes for them"""
        parts = []
        for event in events:
            kind = "reasoning" if isinstance(event, Reasoning) else "text" if isinstance(event, Text) else "call"
            last = self.blocks[-1] if self.blocks else None
            if last is None or last.kind != kind or isinstance(event, CallStart):
                parts.append(self._close_last())
                name, call_id = (event.name, event.id) if isinstance(event, CallStart) else ("", "")
                last = Block(kind, len(self.blocks), name, call_id)
                self.blocks.append(last)
                parts.append(self.open_block(last))
            if not isinstance(event, CallStart):
                last.text += event.text
                parts.append(self.add_text(last, event.text))
        return "".join(parts)

    def _close_last(self) -> str:
        if not self.blocks or self.blocks[-1].is_complete:
            return ""
        self.blocks[-1].is_complete = True
        return self.close_block(self.blocks[-1])

    def _note_end(self, finish: str | None, stop: str | int | None) -> None:
        if finish is not None:
            self.finish, self.stop = self.choice.finish(finish), stop

    def end_blocks(self) -> str:
        """Close the last block; a reply without any has one, an empty text."""
        opening = "" if any(block.kind != "reasoning" for block in self.blocks) else self._open_empty()
        return opening + self._close_last()

    def _open_empty(self) -> str:
        closing = self._close_last()
        self.blocks.append(Block("text", len(self.blocks)))
        return closing + self.open_block(self.blocks[-1])

    def read_whole(self, result: Generation) -> None:
        """Make the blocks of a reply that is no stream."""
        self.take(self.choice.read_whole(result))
        self._note_end(result.finish_reason, result.stop_reason)
        self.end_blocks()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens of the prompt, of them those in the cache already, and of the reply."""
        total = usage(self.asked, self.choices)
        return total["prompt_tokens"], total["prompt_tokens_details"]["cached_tokens"], total["completion_tokens"]

    @property
    def reasoning_tokens(self) -> int:
        """About how many tokens of the reply are thinking."""
        texts = [block.text for block in self.blocks if block.kind == "reasoning"]
        return sum(len(self.choice.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
