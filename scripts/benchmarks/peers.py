"""The same shape on another engine, on the same machine, in the same run.

`peer_process.py` runs the engine in a process of its own, so that its libraries are never loaded here and may live in
another Python environment (`python`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bitnet_ref.benchmark.synthetic import RandomCheckpoint
from bitnet_ref.benchmark.timing import Record, Sample, Timing
from bitnet_ref.errors import BackendError, BackendUnavailable, ConfigError, FormatError
from bitnet_ref.formats.gguf.export import write_gguf_model
from bitnet_ref.formats.hf.writer import hf_config_json
from bitnet_ref.reference.config import ModelConfig
from bitnet_ref.reference.weights import DenseWeight, LinearWeight

SCRIPT = Path(__file__).parent / "peer_process.py"
TIMEOUT_S = 1800.0
PROMPT_REPEATS = 3


@dataclass(frozen=True)
class Peer:
    """An engine that can be measured."""

    pip: str  # the command that installs it
    gguf: str | None = None  # if it reads a file: the GGUF type of the ternary matrices
    quantize: str | None = None  # the type that its own llama-quantize makes of them
    chooses: bool = False  # whether it can be told the device, and whether to keep the weights packed


PEERS = {
    "transformers": Peer("pip install torch transformers", chooses=True),
    "llama-cpp-python": Peer("pip install llama-cpp-python", gguf="tq2_0"),
    "ik-llama-cpp-python": Peer("pip install ik-llama-cpp-python", gguf="i2_s", quantize="IQ2_BN"),
}


@dataclass(frozen=True)
class PeerBench(Record):
    """One peer's speeds."""

    name: str
    version: str
    weights: str  # their format
    threads: int
    prompt_tokens: int
    new_tokens: int
    prompt: Timing  # the whole prompt
    decode: Timing  # one token
    peak_memory_bytes: int

    @property
    def prompt_tokens_per_s(self) -> float:
        """At the best time."""
        return self.prompt_tokens / self.prompt.best_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Of the best step."""
        return 1 / self.decode.best_s

    @property
    def decode_tokens_per_s_median(self) -> float:
        return 1 / self.decode.median_s


def measure_peer(
    name: str,
    config: ModelConfig,
    prompt_tokens: int = 64,
    new_tokens: int = 16,
    *,
    threads: int = 1,
    python: str = sys.executable,
    device: str = "cpu",
    quantized: bool = False,
    file: Path | None = None,
    timeout_s: float = TIMEOUT_S,
) -> PeerBench:
    """Time a random model of that shape on a peer: its prompt, and greedy decoding, one token per step.

    device, quantized: for transformers only. "cuda" runs it on the GPU; True takes its own BitNet linears of packed
    weights, False dense bfloat16.
    file: the dense GGUF that the model was read from. A peer that reads files gets the same one.

    Otherwise it gets a random one in the system's folder for temporary files (TMPDIR), 1.2 GB for a 2B-4T, which is
    deleted afterwards; ik-llama-cpp-python makes a second one from it. Raises BackendUnavailable with the pip command
    if `python` does not have the peer, BackendError if it fails or takes longer than timeout_s.
    """
    peer = PEERS[name]
    if (device, quantized) != ("cpu", False) and not peer.chooses:
        raise BackendError(f"{name} runs as it is: device and quantized are for transformers")
    try:
        shape = hf_config_json(config, None, "BF16")
    except ConfigError as error:
        raise BackendError(f"{name} could not be measured: {error}") from error
    question: dict[str, Any] = {"config": shape, "prompt": prompt_tokens, "new": new_tokens, "threads": threads}
    question |= {"repeats": PROMPT_REPEATS, **({"device": device, "quantized": quantized} if peer.chooses else {})}
    if peer.gguf is None:
        answer = ask_peer(name, python, question, timeout_s)
    elif file is not None:
        answer = ask_peer(name, python, {**question, "file": str(file)}, timeout_s)
    else:
        ask_peer(name, python, {}, timeout_s)  # whether it is installed, before a gigabyte is written
        kind, quantize = ("bf16", None) if config.quantization is None else (peer.gguf, peer.quantize)
        with TemporaryDirectory(prefix="bitnet-ref-") as folder:
            file = Path(folder, "model.gguf")
            try:
                write_random_gguf(config, file, kind)
            except (FormatError, ConfigError, OSError) as error:
                raise BackendError(f"{name} could not be measured: no file of this shape: {error}") from error
            answer = ask_peer(name, python, {**question, "file": str(file), "quantize": quantize}, timeout_s)
    times = [Timing.of([Sample(taken_s) for taken_s in answer[key]]) for key in ("prompt_s", "decode_s")]
    sizes = threads, prompt_tokens, new_tokens
    return PeerBench(name, answer["version"], answer["weights"], *sizes, *times, answer["peak_memory_bytes"])


def ask_peer(name: str, python: str, question: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """The JSON that the peer's process prints. Raises BackendUnavailable, BackendError."""
    command = [python, str(SCRIPT), name, json.dumps(question)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        answer = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise BackendError(f"{name} could not be measured: {type(error).__name__}: {error}") from error
    if answer is None:
        lines = done.stderr.strip().splitlines() or ["no message; too little memory?"]
        why = next((line for line in lines if "GGML_ASSERT" in line), lines[-1])  # a backtrace may follow
        raise BackendError(f"{name} could not be measured: exit status {done.returncode}: {why}")
    if "missing" in answer:
        raise BackendUnavailable(f"{name} is not installed for {python} ({answer['missing']}): {PEERS[name].pip}")
    return answer


class Float16Embedding(RandomCheckpoint):
    """Its embedding and head are float16, not bfloat16."""

    def embedding(self) -> LinearWeight:
        table = super().embedding()
        return DenseWeight(table.array.astype(np.float16)) if isinstance(table, DenseWeight) else table


def write_random_gguf(config: ModelConfig, path: str | os.PathLike[str], kind: str = "tq2_0") -> None:
    """A GGUF without a tokenizer for llama.cpp (tq2_0), bitnet.cpp and ik_llama.cpp (i2_s), or of a dense shape (bf16).

    The embedding and the head of a ternary shape are float16. llama.cpp's architecture with sub-norms has silu, so in
    tq2_0 a shape with relu2 gets silu; no matrix changes. Raises FormatError or ConfigError for a shape that the kind
    or GGUF cannot hold.
    """
    if config.sub_norms and kind == "tq2_0":
        config = replace(config, activation="silu")
    dense = config.quantization is None
    checkpoint = RandomCheckpoint(config) if dense else Float16Embedding(config)
    if checkpoint.by_groups:
        raise ConfigError("the shape is ternary by groups, and no engine is given such a file", field="quantization")
    write_gguf_model(checkpoint, path, kind, dense_type="BF16" if dense else "F16")
