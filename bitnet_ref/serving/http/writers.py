"""How an API writes a reply: `Writer` is what all have in common, `OpenAIWriter` is for chats and completions.

`BlockWriter` is for APIs whose replies are lists of blocks, of which one is open at a time: thinking, text, calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ...generation.results import Generation, StreamChunk
from .choices import Asked, Choice, Writer, usage
from .events import Block, CallStart, Event, Reply, Text

EMPTY: Mapping[str, Any] = {}


def write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def write_event(value: Any, kind: str | None = None) -> str:
    """A server-sent event."""
    return ("" if kind is None else f"event: {kind}\n") + f"data: {write_json(value)}\n\n"


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
        return write_event({**asked.frame([part], is_chunk=True), **facts, **counts})

    def closing(self) -> str:
        end = ""
        if self.asked.usage_in_stream:
            frame = self.asked.frame([], is_chunk=True)
            end = write_event({**frame, "usage": usage(self.asked, self.choices)})
        return end + "data: [DONE]\n\n"

    def failure(self, status: int, facts: Mapping[str, Any]) -> str:
        return write_event(facts) + "data: [DONE]\n\n"

    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        return self.asked.response(self.choices, results)


class BlockWriter(Writer):
    """For one text. Subclasses say what the beginning, a piece and the end of a block look like."""

    def __init__(self, asked: Asked, choices: Sequence[Choice]) -> None:
        super().__init__(asked, choices)
        self.choice, self.reply = choices[0], Reply()
        self.blocks = self.reply.blocks
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
            before = self.blocks[-1:]
            if self.reply.add(event):
                parts += [*map(self.close_block, before), self.open_block(self.blocks[-1])]
            if not isinstance(event, CallStart) and event.text:
                parts.append(self.add_text(self.blocks[-1], event.text))
        return "".join(parts)

    def _note_end(self, finish: str | None, stop: str | int | None) -> None:
        if finish is not None:
            self.finish, self.stop = self.choice.finish(finish), stop

    def end_blocks(self) -> str:
        """Close the last block; a reply without any has one, an empty text."""
        opening = "" if any(block.kind != "reasoning" for block in self.blocks) else self.take([Text("")])
        return opening + self.close_block(self.blocks[-1])

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
        return len(self.choice.tokenizer.encode(self.reply.join("reasoning"), add_special_tokens=False))
