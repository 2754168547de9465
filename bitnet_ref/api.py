"""The public face: `load` a checkpoint, then ask the `Model` for logits, intermediates or text."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .backends import Backend, HeadCandidates, HeadNeed, ScreenedHead, choose_cache_dtype
from .backends.placement import Placement, opened, placed
from .backends.record import NamesFilter, checked_candidates, checked_forward, record
from .errors import BackendUnavailable, GenerationError, TokenizerError
from .formats.checkpoint import Progress, ReadOptions, read_weights
from .formats.open import find_model, open_checkpoint, read_tokenizer_files
from .formats.prepared import PreparedFile
from .reference.cache import KVCache, TokenBatch
from .reference.config import ModelConfig
from .reference.weights import ModelWeights
from .system.sharing import file_identity, share_by_key

if TYPE_CHECKING:
    from .generation import ChatSession, Generation, TokenStream
    from .notebook.profiling import Profile
    from .serving import Engine, EngineConfig
    from .tokenizers import Tokenizer
    from .tokenizers.vocabulary import Vocabulary

log = logging.getLogger(__name__)


def load(
    model: str | os.PathLike[str] = "storyteller",
    *,
    backend: str = "auto",
    threads: int | None = None,
    dtype: str = "float32",
    cache_dtype: str | None = None,
    head: str = "auto",
    memory_limit: int | str | None = None,
    devices: int | Sequence[int] | None = None,
    gpu_layers: int | str | None = None,
    cache_tokens: int | None = None,
    allow_unquantized: bool = False,
    verify: bool = False,
    prepared: bool = False,
    i2_s_layout: str | None = None,
    tl_tiles: str | os.PathLike[str] | None = None,
    share: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Load a model, ready to compute.

    model: the name of a shipped model ("storyteller") or of a pulled one ("org/repo", "org/repo@revision"), a Hugging
        Face folder (config.json beside model.safetensors or its shards), a .safetensors file in such a folder, a
        native file (.bitnet.safetensors), a .gguf or an .onnx file.
    backend: "auto", "numpy" (the reference), "cython" (compiled), "cupy" (NVIDIA; with BITNET_REF_CUDA=emulated the
        same kernels on the processor, slowly).
    threads: how many CPU threads; by default BITNET_REF_NUM_THREADS, OMP_NUM_THREADS, or the physical cores that the
        process may use, cut to its cgroup's limit.
    dtype: "float32", or "float64" (numpy only): the same computation in double precision, to measure float32 by. cupy
        also has "float16" and "bfloat16": attention cache, head and dense matrices in 16 bits.
    cache_dtype: how keys and values are kept: "float32", which is the contract and the default, "float16" or "int8" (a
        scale a token and kv head), for a half or a quarter of the bytes. A narrow cache changes the logits a little;
        `benchmark.measure_cache`, or `bitnet-ref bench cache`, says how much on a text.
    head: "screened" (cython) takes greedy and top-k tokens from the few rows of the head that an int8 copy of it, with
        certain bounds, leaves in question: the same tokens, and half the head's bytes read, for half as many more
        held. "exact" computes every logit. "auto" screens a head of 16 MiB or more.
    memory_limit: the most memory of the card, or of each, that the model may take (cupy), in bytes or as "8GiB".
    devices: the card's number, or of several cards that share the layers by their bytes: [0, 1]. By default card 0.
    gpu_layers: how many layers cards compute, or "all", or else OutOfMemory. By default as many as fit, beside a cache;
        the others stay on the CPU, with a warning that says how many.
    cache_tokens: for how many tokens of cache there is to be room on the cards; by default the model's context, and
        4096 at most.
    allow_unquantized: load a bitnet checkpoint that has no quantization_config as a dense model.
    verify: also compare a native file's content with the hash it carries: the file is read twice.
    prepared: keep the weights as the backend lays them out (cython) in `.bitnet_ref` beside the model, and map them at
        the next start, which then takes no time. A copy as large as the model; see `prepared.PreparedFile`.
    i2_s_layout: "x86", "arm" or "interleaved": the layout of the I2_S matrices of a GGUF, when they do not show it.
    tl_tiles: the kernel_config.ini with the tile sizes of a GGUF's TL1 or TL2 matrices.
    share: give the model that an earlier call with `share` loaded from the same files for the same backend, if it is
        still in use, instead of loading it again. It is dropped when its last user drops it.
    progress: called with (parts done, parts in all) while the weights are read.

    Raises FormatError, ConfigError (a file is not what it should be), BackendUnavailable.
    """
    path = find_model(model)
    where = Placement.of(devices, gpu_layers, cache_tokens)
    chosen, *cards = opened(backend, where, memory_limit, dtype=dtype, threads=threads, head=head)
    choose_cache_dtype(chosen, cache_dtype)  # raises before anything is read
    options = ReadOptions(allow_unquantized, i2_s_layout, None if tl_tiles is None else Path(tl_tiles), verify=verify)

    def read() -> Model:
        kept = PreparedFile(path, chosen, options) if prepared else None
        if kept is not None and (found := kept.read()) is not None:
            return Model(*found, chosen, path, cache_dtype=cache_dtype)
        with open_checkpoint(path, options) as checkpoint:
            be = placed([chosen, *cards], checkpoint, where, cache_dtype)
            weights = be.prepare_model(read_weights(checkpoint, progress, be.prepare_for))
        if kept is not None:
            kept.write(checkpoint.config, weights)
        return Model(checkpoint.config, weights, be, path, cache_dtype=cache_dtype)

    if not share:
        return read()
    plain = [(key, each) for key, each in vars(chosen).items() if isinstance(each, str | int | np.dtype)]
    how = chosen.name, tuple(sorted((key, str(value)) for key, value in plain)), where, memory_limit
    return share_by_key((str(path), file_identity(path), how, options, cache_dtype, prepared), read)


def load_engine(
    model: str | os.PathLike[str] = "storyteller", config: EngineConfig | None = None, **options: Any
) -> Engine:
    """Load a model and start an engine on it, for the config's `backend`, or where that is not available here, for the
    first of its `fallback` that is. config: by default `EngineConfig.load()`. options: of `load`.

    Raises what `load` raises, and ConfigError.
    """
    from .serving import Engine, EngineConfig

    config = EngineConfig.load() if config is None else config
    missing: BackendUnavailable | None = None
    cards = {"devices": config.devices, "gpu_layers": config.gpu_layers, "cache_tokens": config.cache_tokens}
    for backend in (config.backend, *config.fallback):
        on_cards = cards if backend in ("auto", "cupy") else {}
        try:
            loaded = load(model, **{"memory_limit": config.memory_limit, **on_cards, **options, "backend": backend})
        except BackendUnavailable as error:
            missing = missing or error
            continue
        if missing is not None:
            log.warning("backend %s is not available (%s): using %s", config.backend, missing, loaded.backend.name)
        return Engine(loaded, config)
    assert missing is not None
    raise missing


class Model:
    """A loaded model. Holds no state between calls; any number of threads may use it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        backend: Backend,
        path: Path | None = None,
        *,
        cache_dtype: str | None = None,
    ) -> None:
        self.config, self.weights, self.backend, self.path = config, weights, backend, path
        self.cache_dtype = cache_dtype  # None: the backend's own

    def __repr__(self) -> str:
        where = self.path.name if self.path is not None else "in memory"
        cfg = self.config
        return (
            f"<bitnet_ref.Model {where}: {cfg.model_type}, {cfg.num_hidden_layers} layers of {cfg.hidden_size}, "
            f"vocab {cfg.vocab_size}, backend {self.backend.summary}{', screened head' * (self.head == 'screened')}>"
        )

    @property
    def head(self) -> str:
        """How greedy and top-k tokens are found: "screened" (by certain bounds on most logits) or "exact" (all)."""
        return "screened" if isinstance(self.weights.lm_head, ScreenedHead) else "exact"

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the model's folder or file. Raises TokenizerError when there is none."""
        from .tokenizers import load_tokenizer, load_tokenizer_files

        if self.path is None:
            raise TokenizerError("this model was not loaded from a file, so it has no tokenizer")
        if self.path.is_dir():
            return load_tokenizer(self.path)
        return load_tokenizer_files(read_tokenizer_files(self.path), path=self.path)

    def logits(self, token_ids: Sequence[int]) -> NDArray:
        """One full forward pass.   token_ids (T,) ints -> (T, V) in the backend's dtype

        Raises GenerationError for an empty list, an id outside the vocabulary, or more tokens than the model's context.
        """
        tokens = self.check_tokens(token_ids)
        cache = self.new_cache(slots=1, capacity=len(tokens))
        return self.forward(TokenBatch.of([(0, 0, tokens)]), cache)

    def run_with_cache(
        self, token_ids: Sequence[int], names_filter: NamesFilter = None
    ) -> tuple[NDArray, dict[str, NDArray]]:
        """The logits, and every named intermediate of the pass (TransformerLens names; see `tracing.record`).

        names_filter: None for all, a glob ("blocks.*.attn.hook_pattern"), a list of globs, or a callable.
        """
        tokens = self.check_tokens(token_ids)
        cache = self.new_cache(slots=1, capacity=len(tokens))
        return record(self.backend, self.weights, self.config, tokens, names_filter, cache)

    def generate(self, prompt: Any, **params: Any) -> Generation | list[Generation] | list[list[Generation]]:
        """Continue a prompt (text or token ids), or each of a list of prompts.

        Parameters are those of `generation.SamplingParams`: max_tokens, temperature, top_k, top_p, seed, stop, ...
        With n > 1 there is a list of n for each prompt.
        A batch gives, row by row, what each prompt gives alone. Raises GenerationError.
        """
        from .generation import generate

        return generate(self, prompt, **params)

    def stream(self, prompt: str | Sequence[int], **params: Any) -> TokenStream:
        """Continue one prompt and yield each piece of text as it comes. Closing the generator cancels."""
        from .generation import stream

        return stream(self, prompt, **params)

    def chat(self, system: str | None = None, **params: Any) -> ChatSession:
        """A conversation by the model's chat template, which keeps its cache: `send`, `stream`, `reset`."""
        from .generation import ChatSession

        return ChatSession(self, system, **params)

    def profile(self, prompt: Any = None, **params: Any) -> Profile:
        """Where the time goes: enter it (`with model.profile() as profile:`) around anything that runs on this model.

        With a prompt, it generates from it, as `generate` does with these parameters, and the profile of that comes
        back with what was generated as `profile.outcome`. Every thread that uses this model is seen. See
        `profiling.Profile`: print it, `plot()`, `save(path)`.
        """
        from .notebook.profiling import Profile

        profile = Profile(self)
        if prompt is None and params:
            raise GenerationError(f"{next(iter(params))}: a profile without a prompt generates nothing; give a prompt")
        if prompt is not None:
            with profile:
                profile.outcome = self.generate(prompt, **params)
        return profile

    def engine(self, **settings: Any) -> Engine:
        """Continuous batching: many requests at a time, from any threads or asyncio. See `generation.EngineConfig`."""
        from .serving import Engine

        return Engine(self, **settings)

    def close(self) -> None:
        """Give back what the backend holds of a card; the model cannot compute after that. Otherwise: nothing."""
        self.backend.close()

    # -- for the generation package ------------------------------------------------------------------------------------

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of the tokenizer's tokens. Raises TokenizerError when there is no tokenizer."""
        from .tokenizers.vocabulary import Vocabulary

        return Vocabulary(self.tokenizer, self.config.vocab_size)

    def new_cache(
        self,
        slots: int,
        capacity: int,
        *,
        dtype: str | None = None,
        page_size: int | None = None,
        pages: int | None = None,
    ) -> KVCache:
        """An empty KV cache for so many sequences of so many tokens, in `cache_dtype` unless another dtype is given.

        page_size, pages: make it a pool whose page table the caller fills; see `KVCache`.
        """
        return self.backend.new_cache(self.config, slots, capacity, dtype or self.cache_dtype, page_size, pages)

    def forward(self, batch: TokenBatch, cache: KVCache) -> NDArray:
        """Logits of the wanted tokens, all finite: NaN or Inf raises NumericsError naming the first bad tensor."""
        return checked_forward(self.backend, self.weights, self.config, batch, cache)

    def candidates(
        self, batch: TokenBatch, cache: KVCache, needs: Sequence[HeadNeed]
    ) -> tuple[NDArray, list[HeadCandidates]]:
        """`forward`, but of the logits of each wanted token only what it needs; and what the head saw.

        -> final hidden (wanted, D), [HeadCandidates of each wanted token].  Checked like `forward`.
        """
        return checked_candidates(self.backend, self.weights, self.config, batch, cache, needs)

    def head_logits(self, hidden: NDArray) -> NDArray:
        """The whole head for tokens whose final hidden state is known.   hidden (N, D) -> logits (N, V)"""
        with self.backend.running():
            return self.backend.to_host(self.backend.lm_head(hidden, self.weights.lm_head))

    def check_tokens(self, token_ids: Sequence[int], *, any_length: bool = False) -> NDArray[np.int64]:
        """token_ids as an int64 array, non-empty, within the vocabulary and (but for `any_length`) the context."""
        try:
            tokens = np.asarray(token_ids)
        except (ValueError, TypeError, OverflowError):  # lists of different lengths, and things that are no numbers
            tokens = np.empty(0)
        if tokens.ndim != 1 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
            raise GenerationError(f"expected a non-empty list of token ids, got {_describe(token_ids)}")
        if tokens.size > self.config.context_length and not any_length:
            raise GenerationError(
                f"{tokens.size} tokens do not fit the model's context of {self.config.context_length}; shorten them"
            )
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.config.vocab_size))
        if bad.size:
            raise GenerationError(
                f"token id {tokens[bad[0]]} at index {bad[0]} is not in the vocabulary of {self.config.vocab_size}"
            )
        return tokens.astype(np.int64)


def _describe(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
