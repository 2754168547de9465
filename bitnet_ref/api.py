"""The public face: `load` a checkpoint, then ask the `Model` for logits, intermediates or text."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from .backends import choose_cpu
from .backends.loaded import LoadedModel, SteppedWeights
from .backends.placement import Placement, assign_layers, open_backends
from .errors import (
    BackendError,
    BackendUnavailable,
    BitNetRefError,
    ConfigError,
    DeviceError,
    GenerationError,
    OutOfMemory,
)
from .formats.checkpoint import Checkpoint, Progress, ReadOptions, element_bytes, read_weights
from .formats.open import find_model, open_checkpoint, read_tokenizer
from .formats.prepared import PreparedFile
from .formats.registry.describe import describe_model, summarize
from .generation import ChatSession, TokenStream, generate, stream
from .generation.embed import embed, quantize_embeddings
from .generation.generate import Generations, Prompt, Prompts
from .generation.params import SamplingOptions, expand_params
from .generation.score import Score, score
from .reference.cache import TokenIds
from .reference.config import ModelConfig
from .system.sharing import file_identity, model_files, share_by_key
from .system.threads import resolve_threads

if TYPE_CHECKING:
    from .backends import Backend
    from .notebook.profiling import Profile
    from .serving import Engine, EngineConfig
    from .tokenizers import Tokenizer

log = logging.getLogger(__name__)

LARGE_TABLE = 64 << 20  # numbers of an embedding that takes as long to read as a tokenizer


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """What cards compute, and how much of their memory they may use (cupy).

    memory_limit: the maximum memory of each card, in bytes or as "8GiB".
    devices: a card's number, or the numbers of several that share the layers by their bytes: [0, 1]. Default: card 0.
    gpu_layers: how many layers cards compute, or "all", or else OutOfMemory. By default as many as fit beside a cache;
        the others stay on the CPU, with a warning that says how many.
    cache_tokens: tokens of cache to leave room for on the cards; by default the model's context, at most 4096.
    """

    memory_limit: int | str | None = None
    devices: int | Sequence[int] | None = None
    gpu_layers: int | str | None = None
    cache_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How files are read.

    allow_unquantized: load a bitnet checkpoint without quantization_config as a dense model.
    verify: also compare all bytes of a native file, and of prepared weights, with their hashes; each is then read
        twice.
    prepared: keep the weights in the backend's layout (cython) in `.bitnet_ref` beside the model and read them at the
        next start, which then takes little time. It costs disk space as large as the model. "mapped": map them, so that
        processes share the memory, in a folder that no other user can write to; see `formats/prepared.py`.
    i2_s_layout: "x86", "arm" or "interleaved": the layout of a GGUF's I2_S matrices, when they do not show it.
    tl_tiles: the kernel_config.ini with the tile sizes of a GGUF's TL1 or TL2 matrices.
    rotation: "stored" runs matrices in a Hadamard basis (Bonsai 2) as they are, on rotated inputs; "folded" makes dense
        float32 matrices in the plain basis of them.
    dense: "int8" makes int8 of the linears and the head of a model without ternary matrices, with a scale for each 32
        weights of a row: half the bytes of bfloat16. It changes the logits; `bitnet-ref crossval precision` measures by
        how much. Matrices in a GGUF's blocks stay as they are.
    share: return the model that an earlier call with `share` loaded from the same files for the same backend, while it
        is still in use. It is dropped when its last user drops it.
    progress: called with (parts done, all parts) while the weights are read.
    """

    allow_unquantized: bool = False
    verify: bool = False
    prepared: bool | str = False
    i2_s_layout: str | None = None
    tl_tiles: str | os.PathLike[str] | None = None
    rotation: str = "stored"
    dense: str = "stored"
    share: bool = False
    progress: Progress | None = None


def load(
    model: str | os.PathLike[str] = "storyteller",
    *,
    backend: str = "auto",
    threads: int | None = None,
    dtype: str = "float32",
    cache_dtype: str | None = None,
    head: str = "auto",
    device: DeviceOptions | None = None,
    options: LoadOptions | None = None,
    **flat: Any,
) -> Model:
    """Load a model, ready to compute.

    model: the name of a shipped model ("storyteller") or of a pulled one ("org/repo", "org/repo@revision"), a Hugging
        Face folder (config.json beside model.safetensors or its shards), a .safetensors file in such a folder, a
        native file (.bitnet.safetensors), a .gguf or an .onnx file.
    backend: "auto", "numpy" (the reference), "cython" (compiled), "cupy" (NVIDIA; with BITNET_REF_CUDA=emulated the
        same kernels on the processor, slowly).
    threads: CPU threads; by default BITNET_REF_NUM_THREADS, OMP_NUM_THREADS, or the physical cores that the process may
        use, cut to its cgroup's limit.
    dtype: "float32", which is the contract; "float64" (numpy) to measure the error of float32 by; "float16" or
        "bfloat16" (cupy): cache, head and dense matrices in 16 bits.
    cache_dtype: of keys and values: "float32", the default, "float16" or "int8" (one scale per token and kv head), for
        a half or a quarter of the bytes. It changes the logits; `bitnet-ref bench cache` measures by how much.
    head: "screened" (cython) computes greedy and top-k tokens from the few rows of the head that an int8 copy, with
        proven bounds, leaves in question: the same tokens, half the bytes read, half as many more held. "exact"
        computes every logit. "auto" screens a head of 16 MiB or more. A model of 256 MiB or more makes its int8 copy,
        and strips of rows to skip, with its first passes, so that a text begins sooner; `weights` has all of them.
    device, options: see DeviceOptions and LoadOptions. Their fields may also be given here as keywords, as in
        load(path, memory_limit="8GiB", verify=True).

    Raises FormatError, ConfigError (a file or an argument is wrong), BackendUnavailable, OutOfMemory.
    """
    device, options = _gather(device, options, flat)
    return _Load(find_model(model), backend, threads, dtype, cache_dtype, head, device, options).run()


@dataclass(frozen=True)
class _Load:
    """A call of `load` whose file is found, and its further steps: open, place, read, prepare."""

    path: Path
    backend: str
    threads: int | None
    dtype: str
    cache_dtype: str | None
    head: str
    device: DeviceOptions
    options: LoadOptions

    def run(self) -> Model:
        backends = self.open()
        if not self.options.share:
            return self.make(backends)
        return share_by_key(
            self.key(backends[0]), lambda: self.make(backends), is_usable=lambda each: not each.is_closed
        )

    @cached_property
    def placement(self) -> Placement:
        return Placement.of(self.device.devices, self.device.gpu_layers, self.device.cache_tokens)

    @cached_property
    def reading(self) -> ReadOptions:
        asked = self.options
        tiles = None if asked.tl_tiles is None else Path(asked.tl_tiles)
        return ReadOptions(asked.allow_unquantized, asked.i2_s_layout, tiles, asked.verify, asked.rotation, asked.dense)

    @cached_property
    def tokenizer(self) -> Callable[[], Tokenizer]:
        """Reads the tokenizer at its first call."""
        return cache(partial(read_tokenizer, self.path))

    def open(self) -> list[Backend]:
        """The backend that was asked for, and those of the cards. Raises what an argument gets wrong, before any
        weight is read."""
        backends = open_backends(
            self.backend,
            self.placement,
            self.device.memory_limit,
            dtype=self.dtype,
            threads=self.threads,
            head=self.head,
        )
        backends[0].choose_cache_dtype(self.cache_dtype)
        if self.options.dense == "int8" and "cupy" in {be.name for be in backends}:
            raise ConfigError("'int8' is for the CPU's backends: a card would widen it to float32", field="dense")
        return backends

    def make(self, backends: list[Backend]) -> Model:
        """The model of the prepared weights, where there are any; else the checkpoint's, read, placed and prepared."""
        prepared = None
        if self.options.prepared:
            prepared = PreparedFile(self.path, backends[0], self.reading, self.options.prepared)
            if (stored := prepared.read()) is not None:
                return self.model(*stored, backends[0])
        with open_checkpoint(self.path, self.reading) as checkpoint:
            be = self.place(checkpoint, backends)
            if be is None:
                return self.again(choose_cpu())
            weights = self.read(checkpoint, be)
            config = checkpoint.config
        if prepared is not None:
            prepared.write(config, weights.finished())
            if prepared.is_mapped and (stored := prepared.read()) is not None:
                return self.model(*stored, be)
        return self.model(config, weights, be, load_tokenizer=self.tokenizer)

    def place(self, checkpoint: Checkpoint, backends: list[Backend]) -> Backend | None:
        """The backend that computes the layers, or several that share them; None where "auto" chose a card that lacks
        kernels for this model."""
        config = checkpoint.config
        be = assign_layers(backends, config, element_bytes(checkpoint), self.placement, self.cache_dtype)
        try:
            be.check_config(config)
        except BackendUnavailable as lacks:
            if self.backend != "auto" or self.dtype != "float32":
                raise
            warnings.warn(f"{lacks}. Computing without the card", stacklevel=5)
            return None
        return be

    def read(self, checkpoint: Checkpoint, be: Backend) -> SteppedWeights:
        """The weights, each in the backend's layout as soon as it is read."""
        checkpoint.pack_plane = be.pack_plane
        config = checkpoint.config
        is_large = config.vocab_size * config.hidden_size >= LARGE_TABLE
        early = self.try_tokenizer if is_large else None
        stored = read_weights(checkpoint, self.options.progress, be.prepare_for, early)
        return SteppedWeights(be.prepare_in_steps(stored, config))

    def try_tokenizer(self) -> None:
        with suppress(BitNetRefError):  # raised again where it is used
            self.tokenizer()

    def model(self, config: ModelConfig, weights: Any, be: Backend, **settings: Any) -> Model:
        alone = replace(self, options=replace(self.options, share=False, progress=None))
        return Model(config, weights, be, self.path, cache_dtype=self.cache_dtype, load_again=alone.again, **settings)

    def again(self, name: str | None) -> Model:
        """The same call, or with a name one for that backend."""
        if name is None:
            return self.run()
        return replace(self, backend=name, head="auto", device=DeviceOptions()).run()

    def key(self, chosen: Backend) -> tuple[Any, ...]:
        """What two calls must have in common to share a model."""
        plain = [(key, each) for key, each in vars(chosen).items() if isinstance(each, str | int | np.dtype)]
        computing = tuple(sorted((key, str(value)) for key, value in plain))
        files = tuple(map(file_identity, model_files(self.path)))
        asked = self.reading, self.cache_dtype, self.options.prepared
        return str(self.path), files, chosen.name, computing, self.placement, self.device.memory_limit, *asked


def _gather(
    device: DeviceOptions | None, options: LoadOptions | None, flat: dict[str, Any]
) -> tuple[DeviceOptions, LoadOptions]:
    """The two groups with the flat keywords put in. Raises ConfigError for a keyword of neither."""
    groups: list[dict[str, Any]] = [vars(device or DeviceOptions()).copy(), vars(options or LoadOptions()).copy()]
    for name, value in flat.items():
        for group in groups:
            if name in group:
                group[name] = value
                break
        else:
            known = [field.name for kind in (DeviceOptions, LoadOptions) for field in fields(kind)]
            known += ["backend", "threads", "dtype", "cache_dtype", "head"]
            close = get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(sorted(known))}"
            raise ConfigError(f"load has no such parameter; {hint}", field=name)
    return DeviceOptions(**groups[0]), LoadOptions(**groups[1])


def load_engine(
    model: str | os.PathLike[str] = "storyteller", config: EngineConfig | None = None, **options: Any
) -> Engine:
    """Load a model and start an engine on it, for the config's `backend`, or where that is not available here or has
    too little memory, for the first of its `fallback` that has not. config: by default `EngineConfig.load()`. options:
    of `load`.

    Raises what `load` raises, and ConfigError.
    """
    from .serving import Engine, EngineConfig, Replicas, start_engines

    config = EngineConfig.load() if config is None else config
    missing: BackendError | None = None
    cards = {name: getattr(config, name) for name in ("memory_limit", "gpu_layers", "cache_tokens")}
    count, devices = config.replicas, config.devices or ()
    if count > 1 and options.get("threads") is None:
        options["threads"] = max(1, resolve_threads() // count)
    for backend in (config.backend, *config.fallback):
        on_cards = cards if backend in ("auto", "cupy") else {}
        try:
            common = {"dtype": config.dtype, **on_cards, **options, "backend": backend}
            loaded = load(model, devices=devices[::count] or None, **common) if on_cards else load(model, **common)
            if count == 1 or loaded.backend.name in ("numpy", "cython"):
                engine = start_engines(loaded, config)
            elif len(devices) < count:
                raise ConfigError(f"expected at least {count} devices, one for each engine", field="replicas")
            else:
                others = [load(model, devices=devices[number::count], **common) for number in range(1, count)]
                engine = Replicas([Engine(each, config) for each in (loaded, *others)])
        except (BackendUnavailable, OutOfMemory, DeviceError) as error:
            missing = missing or error
            continue
        if missing is not None:
            log.warning("backend %s is not available (%s): using %s", config.backend, missing, loaded.backend.name)
        return engine
    raise missing or BackendUnavailable("the engine's configuration names no backend")


class Model(LoadedModel):
    """A loaded model: logits, intermediates, text, chats, profiles, an engine."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """See `LoadedModel`. A model with a path reads its tokenizer from there."""
        super().__init__(*args, **settings)
        if self._load_tokenizer is None and self.path is not None:
            path = self.path
            self._load_tokenizer = lambda: read_tokenizer(path)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """What the files say: model_type, kind, licence, bytes, last_used, sizes; without files, the config."""
        return summarize(self.config) if self.path is None else describe_model(self.path)

    @expand_params
    def generate(self, prompt: Prompts, **params: Unpack[SamplingOptions]) -> Generations:
        """Continue a prompt (text or token ids), or each of a list of prompts.

        With n > 1, returns a list of n for each prompt. Each row of a batch equals the row generated alone. Raises
        GenerationError.
        """
        return generate(self, prompt, **params)

    @expand_params
    def stream(self, prompt: Prompt, **params: Unpack[SamplingOptions]) -> TokenStream:
        """Continue one prompt and yield each piece of text as it comes. Closing the generator cancels."""
        return stream(self, prompt, **params)

    @expand_params
    def chat(self, system: str | None = None, **params: Unpack[SamplingOptions]) -> ChatSession:
        """A conversation by the model's chat template, which keeps its cache: `send`, `stream`, `reset`."""
        return ChatSession(self, system, **params)

    def score(self, prompt: str | TokenIds, continuations: Sequence[str | TokenIds]) -> list[Score]:
        """How likely each continuation is after the prompt: `logprobs` of its tokens, `total`, `is_greedy`. See
        `generation.score`."""
        return score(self, prompt, continuations)

    def embed(
        self, texts: Prompts, *, prompt: str | None = None, quantize: str | None = None, ranges: NDArray | None = None
    ) -> NDArray:
        """The text (or token ids) as a vector (D,) of length 1, or a list of them as (B, D). See `generation.embed`.

        prompt: put before each text; `generation.embed.instruction_prompt(task)` is Qwen3's. None: the model's default.
        quantize: "int8", "uint8", "binary" or "ubinary", with `ranges` (2, D) of each dimension; None: float32.
        """
        vectors = embed(self, texts, prompt)
        if quantize is None:
            return vectors
        numbers = quantize_embeddings(np.atleast_2d(vectors), quantize, ranges)
        return numbers if vectors.ndim == 2 else numbers[0]

    def profile(self, prompt: Any = None, *, path: str = "ops", **params: Any) -> Profile:
        """Where the time goes: enter it (`with model.profile() as profile:`) around anything that runs on this model.

        With a prompt, it generates from it, as `generate` does with these parameters, and the profile of that comes
        back with what was generated as `profile.outcome`. Every thread that uses this model is seen. path: "ops" times
        each operation, "blocks" the fused blocks, "replayed" whole steps as `generate` computes them. See
        `profiling.Profile`: print it, `plot()`, `save(path)`.
        """
        from .notebook.profiling import Profile

        profile = Profile(self, path)
        if prompt is None and params:
            raise GenerationError(f"{next(iter(params))}: a profile without a prompt generates nothing; give a prompt")
        if prompt is not None:
            with profile:
                profile.outcome = self.generate(prompt, **params)
        return profile

    def engine(self, **settings: Any) -> Engine:
        """Continuous batching: many requests at a time, from any threads or asyncio. See `serving.EngineConfig`."""
        from .serving import start_engines

        return start_engines(self, **settings)
