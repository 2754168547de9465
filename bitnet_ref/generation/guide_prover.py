"""Guides of strangers are compiled in a helper process first: one that ends it, or takes too long, is refused.

llguidance compiles in native code, and a compiled guide cannot be handed to another process. So the helper compiles it
and takes its first steps, within limits on time, memory and stack (`guide_helper.py`); after that this process compiles
it too. What was proven, or refused, is remembered. The server and `batch` do this; in Python a guide is the caller's
own, and is checked against the bounds of `constraint_limits` alone.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import marshal
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import GenerationError, OutOfMemory, RequestTimeout
from ..tokenizers.vocabulary import Vocabulary
from . import guide_helper
from .constraints import describe_vocabulary, first_line, write_grammar
from .params import SamplingParams

HELPERS = 2  # processes at a time
WALL_S = 20.0  # for one guide, on a busy machine; the helper itself limits its processor time
WAIT_S = 20.0  # for a free helper
REMEMBERED = 1024  # guides
FOREIGN_SIGNALS = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT")  # no limit of the helper's own sends them
Digest = bytes


class Helper:
    """One helper process; it is started by the first guide, and again after its death."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._vocabulary: Digest | None = None  # that the process has

    def try_guide(self, vocabulary: tuple[Digest, Any], grammar: str) -> str | None:
        """None when the guide compiles and its first steps end; else what is wrong. RequestTimeout when the machine is
        too busy for that, OutOfMemory when the system ends the process, as it does where memory is short."""
        for _ in range(2):  # an idle process may end while it is written to
            process = self._start()
            digest, content = vocabulary
            messages = [grammar] if digest == self._vocabulary else [content(), grammar]
            try:
                for message in messages:
                    self._send(process, message)
                self._vocabulary = digest
                line = self._read_line(process)
            except BrokenPipeError:
                line = b""
            if line:
                answer: str | None = json.loads(line)
                return answer
            code = self.stop()
            if code != 0 and -(code or 0) not in [getattr(signal, name, None) for name in FOREIGN_SIGNALS]:
                return self._describe_death(code)
        raise OutOfMemory("the system ended the process that compiles guides, twice: is memory short? Try again later")

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(Path(guide_helper.__file__))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C ends this process, whose end then ends that one
                )
            except OSError as problem:  # no memory, or too many processes or files
                raise OutOfMemory(f"no process that compiles guides could be started: {problem}") from problem
        return self._process

    def _send(self, process: subprocess.Popen[bytes], message: Any) -> None:
        data = marshal.dumps(message)
        assert process.stdin is not None
        process.stdin.write(len(data).to_bytes(8, "little") + data)
        process.stdin.flush()

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        line, deadline = b"", time.monotonic() + WALL_S
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                message = f"the guide was not compiled within {WALL_S:g} s; is the machine busy? Try again later"
                raise RequestTimeout(message)  # it has not had CPU_S of processor time, so nothing is known of it
            block = os.read(process.stdout.fileno(), 1 << 16)
            if not block:
                return b""
            line += block
        return line

    def _describe_death(self, code: int | None) -> str:
        sizes = [f"{size >> 20} MiB" for size in (guide_helper.MEMORY_BYTES, guide_helper.STACK_BYTES)]
        return (
            f"compiling it takes more than {guide_helper.CPU_S:g} s, {sizes[0]} or a stack of {sizes[1]} "
            f"(a helper process ended with code {code}); use a smaller or flatter one"
        )

    def stop(self) -> int | None:
        """End the process.   -> its exit code; None if there was none"""
        process, self._process, self._vocabulary = self._process, None, None
        if process is None:
            return None
        with suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            code = process.wait(0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return code


class Prover:
    """The helpers of this process, and what they have said of the last guides."""

    def __init__(self) -> None:
        self._free = [Helper() for _ in range(HELPERS)]
        self._lock = threading.Condition()
        self._answers: OrderedDict[Digest, str | None] = OrderedDict()
        self.compiled = 0  # guides that a helper was asked about

    def prove(self, grammar: str, vocabulary: Vocabulary) -> str | None:
        """None when the guide compiles within the limits; else what is wrong. Raises RequestTimeout."""
        name = _hash_vocabulary(vocabulary)
        key = hashlib.sha256(name + grammar.encode(errors="surrogatepass")).digest()
        with self._lock:
            if key in self._answers:
                self._answers.move_to_end(key)
                return self._answers[key]
            if not self._lock.wait_for(lambda: self._free, WAIT_S):
                raise RequestTimeout(f"other guides are being compiled, and have taken {WAIT_S:g} s; try again")
            helper = self._free.pop()
        return self._ask(helper, (name, lambda: describe_vocabulary(vocabulary)), key, grammar)

    def stop(self) -> None:
        """End the processes that have nothing to do."""
        with self._lock:
            for helper in self._free:
                helper.stop()

    def _ask(self, helper: Helper, vocabulary: tuple[Digest, Any], key: Digest, grammar: str) -> str | None:
        try:
            answer = helper.try_guide(vocabulary, grammar)
        except BaseException:
            helper.stop()
            raise
        finally:
            with self._lock:
                self._free.append(helper)
                self._lock.notify()
        with self._lock:
            self.compiled += 1
            self._answers[key] = answer
            while len(self._answers) > REMEMBERED:
                self._answers.popitem(last=False)
        return answer


def prove_guide(params: SamplingParams, vocabulary: Vocabulary) -> None:
    """Let a helper compile what the text must match, if there is such a parameter.

    Raises GenerationError for a guide that does not compile within the limits, RequestTimeout if no helper was free for
    a while or the machine is too busy, and OutOfMemory if no helper runs. On Windows, which has no such limits, the
    bounds of `constraint_limits` have to do.
    """
    for guide, value in params.guides.items():
        grammar = write_grammar(guide, value)
        problem = None if os.name == "nt" else _prover.prove(grammar, vocabulary)
        if problem is not None:
            raise GenerationError(first_line(problem), field=guide)


_hashes: WeakKeyDictionary[Vocabulary, Digest] = WeakKeyDictionary()


def _hash_vocabulary(vocabulary: Vocabulary) -> Digest:
    if vocabulary not in _hashes:
        _hashes[vocabulary] = hashlib.sha256(marshal.dumps(describe_vocabulary(vocabulary))).digest()
    return _hashes[vocabulary]


def _forget_helpers() -> None:
    """In a child process, whose pipes would be shared with its parent."""
    global _prover
    _prover = Prover()


_prover = Prover()
atexit.register(lambda: _prover.stop())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_helpers)
