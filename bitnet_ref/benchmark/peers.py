"""The same shape on another engine, on the same machine, in the same run: each in a process of its own.

A peer is a script that takes the shape as JSON and prints its times as JSON, so a peer's libraries are never loaded
here, and may live in another Python environment (`python`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..errors import BackendError, BackendUnavailable, ConfigError, FormatError
from ..reference.config import ModelConfig
from .random_file import write_random_gguf
from .timing import Timing

TIMEOUT_S = 1800.0
PROMPT_REPEATS = 3


@dataclass(frozen=True)
class Peer:
    """An engine that can be measured."""

    script: str  # beside this file
    pip: str  # what installs it
    gguf: str | None = None  # it reads a file: what its ternary matrices are written as
    chooses: bool = False  # whether it can be told the device, and whether to keep the weights packed


PEERS = {
    "transformers": Peer("peer_transformers.py", "pip install torch transformers", chooses=True),
    "llama-cpp-python": Peer("peer_llama_cpp.py", "pip install llama-cpp-python", gguf="tq2_0"),
}


@dataclass(frozen=True)
class PeerBench:
    """One peer's speeds."""

    name: str
    version: str
    weights: str  # in what form it keeps them
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

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        derived = ("prompt_tokens_per_s", "decode_tokens_per_s")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


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
    timeout_s: float = TIMEOUT_S,
) -> PeerBench:
    """Time a random model of that shape on a peer: its prompt, and decoding greedily, one token at a time.

    device, quantized: for transformers alone: "cuda" runs it on the GPU, and True with its own BitNet linears of packed
    weights, where False means dense bfloat16.

    A peer that reads a file gets one in the system's folder for temporary files (TMPDIR), 1.2 GB for a 2B-4T, which is
    deleted afterwards. Raises BackendUnavailable with the pip command when `python` does not have the peer,
    BackendError when it fails, or has not ended after timeout_s.
    """
    peer = PEERS[name]
    if (device, quantized) != ("cpu", False) and not peer.chooses:
        raise BackendError(f"{name} runs as it is: device and quantized are for transformers")
    asked = {
        "config": peer_config(config),
        "prompt": prompt_tokens,
        "new": new_tokens,
        "repeats": PROMPT_REPEATS,
        "threads": threads,
        **({"device": device, "quantized": quantized} if peer.chooses else {}),
    }
    if peer.gguf is None:
        found = _run(name, peer, python, asked, timeout_s)
    else:
        _run(name, peer, python, {}, timeout_s)  # is it there? before a gigabyte is written
        with TemporaryDirectory(prefix="bitnet-ref-") as folder:
            file = Path(folder, "model.gguf")
            try:
                write_random_gguf(config, file, peer.gguf)
            except (FormatError, ConfigError, OSError) as error:
                raise BackendError(f"{name} could not be measured: no file of this shape: {error}") from error
            found = _run(name, peer, python, {**asked, "file": str(file)}, timeout_s)
    return PeerBench(
        name,
        found["version"],
        found["weights"],
        threads,
        prompt_tokens,
        new_tokens,
        Timing.of(found["prompt_s"]),
        Timing.of(found["decode_s"]),
        found["peak_memory_bytes"],
    )


def _run(name: str, peer: Peer, python: str, asked: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """What the peer's script says to what is asked. Raises BackendUnavailable, BackendError."""
    command = [python, str(Path(__file__).parent / peer.script), json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise BackendError(f"{name} could not be measured: {type(error).__name__}: {error}") from error
    if found is None:
        lines = done.stderr.strip().splitlines()
        why = lines[-1] if lines else "no message; too little memory?"
        raise BackendError(f"{name} could not be measured: exit status {done.returncode}: {why}")
    if "missing" in found:
        raise BackendUnavailable(f"{name} is not installed for {python} ({found['missing']}): {peer.pip}")
    return found


def peer_config(config: ModelConfig) -> dict[str, Any]:
    """The shape as a Hugging Face config has it."""
    same = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    more = ("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings")
    return {
        **{name: getattr(config, name) for name in same + more},
        "hidden_act": config.activation,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        **({"sliding_window": config.sliding_window} if config.model_type == "mistral" else {}),
    }
