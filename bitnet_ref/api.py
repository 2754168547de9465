"""The public face: `load` a checkpoint, then ask the `Model` for logits, intermediates or text."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from .backends import choose_cpu
from .backends.loaded import LoadedModel, SteppedWeights
from .backends.options import ComputeOptions, DeviceOptions
from .backends.placement import assign_layers, open_backends
from .errors import (
    BackendError,
    BackendUnavailable,
    BitNetRefError,
    ConfigError,
    DeviceError,
    GenerationError,
    OutOfMemory,
)
from .families.lora import Adapter
from .formats.checkpoint import Checkpoint, LoadOptions, Progress, element_bytes, read_weights
from .formats.hf.adapter import NO_ADAPTER, adapter_files, find_adapter, read_adapter
from .formats.open import describe_ignored, find_model, open_checkpoint, read_tokenizer
from .formats.prepared import PreparedFile
from .formats.registry.describe import describe_model, summarize
from .generation import ChatSession, TokenStream, generate, stream
from .generation.embed import Bytes, embed, quantize_embeddings
from .generation.generate import Generations, Prompt, Prompts
from .generation.params import SamplingOptions, expand_params
from .generation.score import Score, score
from .reference.cache import TokenIds
from .reference.config import ModelConfig
from .reference.layers import Floats
from .reference.weights import ModelWeights
from .system.lazy import lazy_property
from .system.options import declared_options, show_options, suggest
from .system.sharing import file_identity, model_files, share_by_key
from .system.threads import resolve_threads

if TYPE_CHECKING:
    from .backends import Backend
    from .notebook.profiling import Profile
    from .serving import Engine, EngineConfig
    from .serving.engine_config import EngineOptions
    from .tokenizers import Tokenizer

log = logging.getLogger(__name__)

LARGE_TABLE = 64 << 20  # numbers of an embedding that takes as long to read as a tokenizer


class FlatOptions(TypedDict, total=False):
    """The fields of DeviceOptions and LoadOptions as keywords of `load`, for type checkers; a test compares them."""

    memory_limit: int | str | None
    devices: int | Sequence[int] | None
    gpu_layers: int | str | None
    cache_tokens: int | None
    allow_unquantized: bool
    verify: bool
    prepared: bool | str
    i2_s_layout: str | None
    adapter: str | os.PathLike[str] | None
    tl_tiles: str | os.PathLike[str] | None
    activations: str
    rotation: str
    dense: str
    share: bool
    progress: Progress | None


class LoadKeywords(FlatOptions, total=False):
    """All keywords of `load`."""

    backend: str
    threads: int | None
    dtype: str
    cache_dtype: str | None
    head: str
    device: DeviceOptions | None
    options: LoadOptions | None


@show_options(ComputeOptions, DeviceOptions, LoadOptions, types=LoadKeywords)
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
    **flat: Unpack[FlatOptions],
) -> Model:
    """Load a model, ready to compute.

    model: the name of a shipped model ("storyteller") or of a pulled one ("org/repo", "org/repo@revision"), a Hugging
        Face folder (config.json beside model.safetensors or its shards), a .safetensors file in such a folder, a
        native file (.bitnet.safetensors), a .gguf or an .onnx file.
    device, options: groups of the options below. Their fields may also be given here as keywords, as in
        load(path, memory_limit="8GiB", verify=True).

    Raises FormatError, ConfigError (a file or an argument is wrong), BackendUnavailable, OutOfMemory.
    """
    compute = ComputeOptions(backend=backend, threads=threads, dtype=dtype, cache_dtype=cache_dtype, head=head)
    device, options = _gather(device or DeviceOptions(), options or LoadOptions(), flat)
    path, adapter = find_adapter(find_model(model), options.adapter)
    if adapter is not None and options.prepared:
        raise ConfigError("prepared weights are kept of models without an adapter only", field="prepared")
    own = replace(options, adapter=NO_ADAPTER if adapter is None else adapter)
    return _Load(find_model(path), compute, device, own).run()


@dataclass(frozen=True)
class _Load:
    """A call of `load` whose file is found, and its further steps: open, place, read, prepare."""

    path: Path
    compute: ComputeOptions
    device: DeviceOptions
    options: LoadOptions

    def run(self) -> Model:
        backends = self.open()
        if not self.options.share:
            return self.make(backends)
        return share_by_key(
            self.key(backends[0]), lambda: self.make(backends), is_usable=lambda each: not each.is_closed
        )

    @lazy_property
    def tokenizer(self) -> Callable[[], Tokenizer]:
        """Reads the tokenizer at its first call."""
        return cache(partial(read_tokenizer, self.path))

    def open(self) -> list[Backend]:
        """The backend that was asked for, and those of the cards. Raises what an argument gets wrong, before any
        weight is read."""
        backends = open_backends(self.compute, self.device)
        backends[0].choose_cache_dtype(self.compute.cache_dtype)
        if self.options.dense == "int8" and "cupy" in {be.name for be in backends}:
            raise ConfigError("'int8' is for the CPU's backends: a card would widen it to float32", field="dense")
        return backends

    def make(self, backends: list[Backend]) -> Model:
        """The model of the prepared weights, where there are any; else the checkpoint's, read, placed and prepared."""
        prepared = None
        if self.options.prepared:
            prepared = PreparedFile(self.path, backends[0], self.options)
            if (stored := prepared.read()) is not None:
                return self.model(*stored, backends[0])
        with open_checkpoint(self.path, self.options) as checkpoint:
            be = self.place(checkpoint, backends)
            if be is None:
                return self.again(choose_cpu())
            weights = self.read(checkpoint, be)
            config = checkpoint.config
            if words := describe_ignored(self.path, checkpoint.path):
                log.warning("%s", words)
        if prepared is not None:
            prepared.write(config, weights.finished())
            if prepared.is_mapped and (stored := prepared.read()) is not None:
                return self.model(*stored, be)
        return self.model(config, weights, be, load_tokenizer=self.tokenizer, texts_path=checkpoint.texts_path)

    def place(self, checkpoint: Checkpoint, backends: list[Backend]) -> Backend | None:
        """The backend that computes the layers, or several that share them; None where "auto" chose a card that lacks
        kernels for this model."""
        config = checkpoint.config
        be = assign_layers(backends, config, element_bytes(checkpoint), self.device, self.compute.cache_dtype)
        try:
            be.check_config(config)
        except BackendUnavailable as lacks:
            if self.compute.backend != "auto" or self.compute.dtype != "float32":
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

    def model(
        self,
        config: ModelConfig,
        weights: ModelWeights | SteppedWeights,
        be: Backend,
        *,
        load_tokenizer: Callable[[], Tokenizer] | None = None,
        texts_path: Path | None = None,
    ) -> Model:
        alone = replace(self, options=replace(self.options, share=False, progress=None))
        return Model(
            config,
            weights,
            be,
            self.path,
            cache_dtype=self.compute.cache_dtype,
            load_tokenizer=load_tokenizer,
            load_again=alone.again,
            texts_path=texts_path,
        )

    def again(self, name: str | None) -> Model:
        """The same call, or with a name one for that backend."""
        if name is None:
            return self.run()
        compute = replace(self.compute, backend=name, head="auto")
        return replace(self, compute=compute, device=DeviceOptions()).run()

    def key(self, chosen: Backend) -> tuple[Any, ...]:
        """What two calls must have in common to share a model."""
        plain = [(key, each) for key, each in vars(chosen).items() if isinstance(each, str | int | np.dtype)]
        computing = tuple(sorted((key, str(value)) for key, value in plain))
        read = model_files(self.path)
        if self.options.adapter not in (None, NO_ADAPTER):
            read += adapter_files(Path(str(self.options.adapter)))
        files = tuple(map(file_identity, read))
        asked = tuple(self.options.reading.items()), self.options.verify, self.options.prepared
        return str(self.path), files, chosen.name, computing, self.compute.cache_dtype, self.device, *asked


def _gather(device: DeviceOptions, options: LoadOptions, flat: Mapping[str, Any]) -> tuple[DeviceOptions, LoadOptions]:
    """The two groups with the flat keywords put in. Raises ConfigError for a keyword of neither."""
    on_cards, of_files = declared_options(DeviceOptions), declared_options(LoadOptions)
    for name in flat:
        if name not in on_cards and name not in of_files:
            known = sorted({*on_cards, *of_files, *declared_options(ComputeOptions)})
            raise ConfigError(f"load has no such parameter; {suggest(name, known)}", field=name)
    device = replace(device, **{name: value for name, value in flat.items() if name in on_cards})
    options = replace(options, **{name: value for name, value in flat.items() if name in of_files})
    return device, options


@show_options(ComputeOptions, DeviceOptions, LoadOptions, types=LoadKeywords)
def load_engine(
    model: str | os.PathLike[str] = "storyteller",
    config: EngineConfig | None = None,
    room: int | None = None,
    **options: Unpack[LoadKeywords],
) -> Engine:
    """Load a model and start an engine on it, for the config's `backend`, or where that is not available here or has
    too little memory, for the first of its `fallback` that has not. config: by default `EngineConfig.load()`.
    room: bytes that the weights and, where the config does not say otherwise, the caches may hold.

    Options of `load` that are given here go before the config's. Raises what `load` raises, and ConfigError.
    """
    from .serving import Engine, EngineConfig, Replicas, start_engines
    from .serving.cache_memory import share_memory

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
                engine = start_engines(loaded, config, room)
            elif len(devices) < count:
                raise ConfigError(f"expected at least {count} devices, one for each engine", field="replicas")
            else:
                models = [loaded, *(load(model, devices=devices[n::count], **common) for n in range(1, count))]
                share = None if room is None else room // count
                engine = Replicas([Engine(each, share_memory(each, config, share, 1)) for each in models])
        except (BackendUnavailable, OutOfMemory, DeviceError) as error:
            missing = missing or error
            continue
        if missing is not None:
            log.warning("backend %s is not available (%s): using %s", config.backend, missing, loaded.backend.name)
        return engine
    raise missing or BackendUnavailable("the engine's configuration names no backend")


class Model(LoadedModel):
    """A loaded model: logits, intermediates, text, chats, profiles, an engine."""

    def _read_tokenizer(self) -> Tokenizer:
        return super()._read_tokenizer() if self.path is None else read_tokenizer(self.path)

    @lazy_property
    def metadata(self) -> dict[str, Any]:
        """What the files say: model_type, kind, licence, bytes, last_used, sizes; without files, the config."""
        return summarize(self.config) if self.path is None else describe_model(self.path)

    def add_adapter(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Let calls name a LoRA adapter, as peft writes it: `generate(..., adapter="name")`. Its terms stay apart from
        the weights, so each call has its own adapter, or none. `with_adapter(name)` is this model with it on.

        Raises ConfigError, FormatError; also for an adapter of lm_head, which `load(..., adapter=FOLDER)` puts on.
        """
        self.put_adapter(name, Adapter(read_adapter(Path(folder), self.config)))

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

    @overload
    def embed(
        self, texts: Prompts, *, prompt: str | None = None, dimensions: int | None = None
    ) -> NDArray[np.float32]: ...

    @overload
    def embed(
        self,
        texts: Prompts,
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        quantize: str | None,
        ranges: Floats | None = None,
    ) -> NDArray[np.float32] | Bytes: ...

    def embed(
        self,
        texts: Prompts,
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        quantize: str | None = None,
        ranges: Floats | None = None,
    ) -> NDArray[np.float32] | Bytes:
        """The text (or token ids) as a vector (D,) of length 1, or a list of them as (B, D). See `generation.embed`.

        prompt: put before each text; `generation.embed.instruction_prompt(task)` is Qwen3's. None: the model's default.
        dimensions: the first so many numbers of each vector, scaled to length 1 again; None: all.
        quantize: "int8", "uint8", "binary" or "ubinary", with `ranges` (2, D) of each dimension; None: float32.
        """
        vectors = embed(self, texts, prompt, dimensions)
        if quantize is None:
            return vectors
        numbers = quantize_embeddings(np.atleast_2d(vectors), quantize, ranges)
        return numbers if vectors.ndim == 2 else numbers[0]

    @expand_params
    def profile(
        self, prompt: Prompts | None = None, *, path: str = "ops", **params: Unpack[SamplingOptions]
    ) -> Profile:
        """Where the time goes: enter it (`with model.profile() as profile:`) around anything that runs on this model.

        With a prompt, it generates from it, as `generate` does with these parameters, and the profile of that comes
        back with what was generated as `profile.outcome`. Every thread that uses this model is seen. path: "ops" times
        each operation, "blocks" the fused blocks, "replayed" whole steps as `generate` computes them. See
        `profiling.Profile`: print it, `plot()`, `save(path)`.
        """
        from .notebook.profiling import Profile

        profile = Profile(self, path)
        if prompt is None and params:
            message = "a profile without a prompt generates nothing; give a prompt"
            raise GenerationError(message, field=next(iter(params)))
        if prompt is not None:
            with profile:
                profile.outcome = self.generate(prompt, **params)
        return profile

    def engine(self, config: EngineConfig | None = None, **settings: Unpack[EngineOptions]) -> Engine:
        """Continuous batching: many requests at a time, from any threads or asyncio. See `serving.EngineConfig`."""
        from .serving import start_engines

        return start_engines(self, config, **settings)
