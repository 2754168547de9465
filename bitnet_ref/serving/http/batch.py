"""OpenAI's batch files: a request in each line, answered as the server answers it. `run_batch` runs a file.

A line's answer depends on the line and the model alone, not on the clock, the number of workers or what ran beside it:
ids are made from the line's hash, `created` is 0, a request without a seed gets one from the hash, and usage does not
count cached tokens. So a run that was interrupted, or whose workers were killed, writes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import BitNetRefError, FormatError, QueueFull, StorageError
from ...generation.embed import embed
from ...system.atomic import atomic_path, explain_os_errors, lock_file
from ...system.json_file import open_regular
from ...system.workers import Workers
from ..engine import Engine
from . import schemas
from .choices import Choice
from .failures import blame, describe_failure
from .fingerprint import fingerprint_of
from .schemas import RequestError
from .shapes import embedding_ids, embedding_response, read_chat, read_completion

LINES_AT_A_TIME = 16  # answered together: one item of a worker
MAX_LINE_BYTES = 4 << 20  # as a request of the server
SYNC_S = 5.0
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
ID = "batch_req_"
JOURNAL = 2  # the form of its lines
CHECKSUM = 17  # characters before each answer of a journal: 16 of a SHA-256, and a blank
ANSWERED, AT_FAULT = b',"response":{"status_code":200,', b',"response":{"status_code":5'  # no JSON text holds these


@dataclass(frozen=True)
class BatchServer:
    """What answers the lines: an engine by a name."""

    engine: Engine
    model_name: str
    chat_template: str | None = None
    unknown: schemas.UnknownFields | None = None  # leaves them out; None: they are errors
    adapters: tuple[str, ...] = ()  # of the engine, which requests name as MODEL:ADAPTER

    def engine_for(self, name: str) -> Engine:
        """The engine that answers for this model. RequestError where there is none."""
        base, _, adapter = name.rpartition(":")
        if base == self.model_name and adapter in self.adapters:
            return self.engine.with_adapter(adapter)
        if name != self.model_name:
            names = ", ".join([self.model_name, *(f"{self.model_name}:{each}" for each in self.adapters)])
            raise RequestError(f"there is no model {name[:200]!r}; there are: {names}", "model", 404, "model_not_found")
        return self.engine


@dataclass
class BatchSummary:
    """lines: answered, of which `failed` have another status than 200.

    reused: those of an earlier run. damaged: lines of its journal that were computed again.
    """

    lines: int = 0
    failed: int = 0
    reused: int = 0
    seconds: float = 0.0
    damaged: int = 0


# -- lines -------------------------------------------------------------------------------------------------------------


@dataclass
class BatchLine:
    """A line, on its way to its answer."""

    digest: str
    custom_id: str | None = None
    status: int = 200
    body: dict[str, Any] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        self.status, self.body = describe_failure(error)

    def finish(self) -> None:
        """Wait for the texts."""
        if not self.choices or self.body:
            return
        asked = self.choices[0].asked
        asked.id, asked.created = f"{asked.id.partition('-')[0]}-{self.digest[:32]}", 0
        try:
            self.body = asked.response(self.choices, [choice.result() for choice in self.choices])
        except Exception as error:
            self.fail(blame(error) if isinstance(error, BitNetRefError) else error)
            return
        self.body["usage"].pop("prompt_tokens_details")
        for choice in self.body["choices"]:
            for number, call in enumerate(choice.get("message", {}).get("tool_calls", ())):
                call["id"] = f"call_{self.digest[:20]}{choice['index']:02x}{number:02x}"

    def line(self) -> str:
        response = {"status_code": self.status, "request_id": self.digest[:32], "body": self.body}
        facts = {"id": f"{ID}{self.digest[:32]}", "custom_id": self.custom_id, "response": response, "error": None}
        try:
            text = json.dumps(facts, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
            text.encode()
        except ValueError as error:  # the answer has what is no JSON or no text
            response["status_code"], response["body"] = describe_failure(error)
            facts["custom_id"] = None if self.custom_id is None else self.custom_id.encode(errors="replace").decode()
            return json.dumps(facts, allow_nan=False, separators=(",", ":")) + "\n"
        return text


def digest_of(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def batch_id(line: bytes) -> str:
    return f"{ID}{digest_of(line)[:32]}"


def answer_lines(server: BatchServer, lines: Sequence[bytes]) -> list[str]:
    """The output line of each line: the answer, or what was wrong with it."""
    jobs: list[BatchLine] = []
    with ExitStack() as stack:
        for line in lines:
            job = BatchLine(digest_of(line))
            try:
                _start(server, job, line, jobs)
            except Exception as error:  # whatever a line does, the others are answered
                job.fail(error)
            for choice in job.choices:
                stack.callback(choice.handle.close)
            jobs.append(job)
        for job in jobs:
            job.finish()
        return [job.line() for job in jobs]


def _start(server: BatchServer, job: BatchLine, data: bytes, earlier: Sequence[BatchLine]) -> None:
    """Check the line, and submit its texts to the engine. Raises RequestError and what the engine raises."""
    if len(data) > MAX_LINE_BYTES:
        raise RequestError(f"the line has more than {MAX_LINE_BYTES} bytes, which is the maximum", status=413)
    entry = schemas.parse_json(data)
    if not isinstance(entry, dict) or not isinstance(entry.get("custom_id"), str):
        raise RequestError("expected an object with a custom_id, a text", "custom_id")
    job.custom_id = entry["custom_id"]
    if entry.get("method", "POST") != "POST" or entry.get("url") not in PATHS:
        raise RequestError(f"expected POST to {' or '.join(PATHS)}", "url", 404)
    path, body = entry["url"], entry.get("body")
    if server.unknown is not None and isinstance(body, dict):
        server.unknown.drop(body, path)
    schemas.check(body, path)
    assert isinstance(body, dict)
    name = server.model_name if body.get("model") is None else body["model"]
    engine = server.engine_for(name)
    if body.get("stream"):
        raise RequestError("a batch has no streams", "stream")
    if path == "/v1/embeddings":
        model = engine.adapted_model
        rows = embedding_ids(model, body)
        job.body = embedding_response(
            body, name, embed(model, rows, dimensions=body.get("dimensions")), sum(map(len, rows))
        )
        return
    read = read_completion if path == "/v1/completions" else read_chat
    asked = read(body, name, engine, server.chat_template)
    asked.fingerprint = fingerprint_of(engine, server.chat_template)
    if "seed" not in engine.config.sampling:
        asked.params.setdefault("seed", int(job.digest[:15], 16))
    for other in (*earlier, None):
        try:
            job.choices = asked.submit(engine)
            return
        except QueueFull:
            if other is None:
                raise
            other.finish()


# -- files -------------------------------------------------------------------------------------------------------------


def run_batch(
    source: Path,
    target: Path,
    workers: Workers,
    run: Mapping[str, Any],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> BatchSummary:
    """Answer each line of `source`, and write the answers to `target`, in the order of the lines, when all are there.

    Until then they are in TARGET.partial, from which the next run goes on; answers with a status of 500 or more are
    computed again, and so are those of damaged lines: each line of TARGET.partial begins with its checksum. run: what
    the answers depend on beside the lines, by content: another run's TARGET.partial is refused. workers: whose resource
    is a `BatchServer`.
    Raises FormatError, StorageError, and what the workers raise. An interrupt keeps TARGET.partial.
    """
    started, partial = time.perf_counter(), target.with_name(target.name + ".partial")
    with open_regular(source, FormatError) as raw, explain_os_errors(partial), partial.open("a+b") as journal:
        file: BinaryIO = BufferedReader(raw)
        summary = BatchSummary()
        total = _check_ids(file, source)
        try:
            lock_file(journal.fileno(), block=False)
        except BlockingIOError:
            raise StorageError("another process is writing it", path=partial) from None
        header = json.dumps({**run, "journal": JOURNAL}, sort_keys=True).encode()
        places, summary.damaged = _read_journal(journal, partial, header)
        missing = (line for line in read_lines(file) if batch_id(line) not in places)
        done = summary.reused = sum(batch_id(line) in places for line in read_lines(file))
        progress(done, total)
        synced_s = time.monotonic()
        for _, answers in workers.map(answer_lines, in_groups(missing, LINES_AT_A_TIME)):
            for text in answers:
                _append(journal, places, text.encode())
            journal.flush()
            if time.monotonic() - synced_s > SYNC_S:
                os.fsync(journal.fileno())
                synced_s = time.monotonic()
            done += len(answers)
            progress(done, total)
        with atomic_path(target) as temporary, temporary.open("wb") as out:
            for line in read_lines(file):
                offset, length = places[batch_id(line)]
                journal.seek(offset)
                answer = journal.read(length)
                out.write(answer)
                summary.failed += ANSWERED not in answer
        partial.unlink()
    summary.lines, summary.seconds = total, time.perf_counter() - started
    return summary


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines that are not blank, from the start; of one that is too long, MAX_LINE_BYTES + 1 bytes.

    Each step seeks: two of these may read one file at a time.
    """
    offset = 0
    while True:
        file.seek(offset)
        rest = line = file.readline(MAX_LINE_BYTES + 1)
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_LINE_BYTES + 1)
        offset = file.tell()
        if not line:
            return
        if line := line.strip():
            yield line


def in_groups(lines: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    lines = iter(lines)
    while group := list(islice(lines, size)):
        yield group


def _check_ids(file: BinaryIO, source: Path) -> int:
    """The number of lines. Raises FormatError for no line, or two with one custom_id."""
    seen, count = set[str](), 0
    for line in read_lines(file):
        count += 1
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # that line's answer says so
            continue
        custom_id = entry.get("custom_id") if isinstance(entry, dict) else None
        if isinstance(custom_id, str):
            if custom_id in seen:
                message = f"two lines have the custom_id {custom_id[:200]!r}; it has to tell their answers apart"
                raise FormatError(message, path=source, field=f"line {count}")
            seen.add(custom_id)
    if not count:
        raise FormatError("has no line; expected a request in each", path=source)
    return count


def _read_journal(journal: BinaryIO, path: Path, header: bytes) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each answer of an interrupted run is, its id -> (offset, length), and how many lines were damaged.

    A last line that is torn is cut off and not counted: it was never whole.
    """
    journal.seek(0)
    first, places, damaged = journal.readline(), dict[str, tuple[int, int]](), 0
    expected = _checked(header + b"\n")
    if first.endswith(b"\n") and first != expected:
        raise FormatError("is of another run (other model, settings or version), or damaged; delete it", path=path)
    end = len(first) if first == expected else 0
    if end:
        while (line := journal.readline()).endswith(b"\n"):
            answer = line[CHECKSUM:]
            if _checked(answer) != line:
                damaged += 1
            elif AT_FAULT not in answer:
                places[answer_id(answer)] = end + CHECKSUM, len(answer)
            end += len(line)
    journal.truncate(end)
    if not end:
        journal.write(expected)
    return places, damaged


def answer_id(answer: bytes) -> str:
    """The id in a line of answers, which begins {"id":"."""
    return answer[7 : 7 + len(ID) + 32].decode()


def _checked(line: bytes) -> bytes:
    """The line of a journal: the checksum of the answer, and the answer."""
    return digest_of(line)[: CHECKSUM - 1].encode() + b" " + line


def _append(journal: BinaryIO, places: dict[str, tuple[int, int]], answer: bytes) -> None:
    journal.seek(0, os.SEEK_END)
    places[answer_id(answer)] = journal.tell() + CHECKSUM, len(answer)
    journal.write(_checked(answer))
