"""`LoadedModel`: config, weights and backend together. What generation, serving and comparisons need of a model."""

from __future__ import annotations

import copy
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendError, ConfigError, ContextOverflow, GenerationError, ShapeError, TokenizerError, describe
from ..families.lora import AdaptedLinear, Adapter, select_adapters
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig
from ..reference.layers import Floats
from ..reference.weights import ModelWeights
from ..system.forks import ForkLock
from ..system.lazy import lazy_property
from .backend import Backend, GreedyRun, Ids, plain_weights
from .observe import observe
from .paged_cache import CacheSpec, EngineKVCache
from .record import NamesFilter, Recorder, check_matched
from .run import Logits, TokenLogits, run, run_greedy, run_hidden, split_into_passes

if TYPE_CHECKING:
    from ..tokenizers.base import Tokenizer
    from ..tokenizers.vocabulary import Vocabulary


log = logging.getLogger(__name__)

# (backend, config, batch, cache of a pass) -> a context that gives the backend to compute it with
Watcher = Callable[[Backend, ModelConfig, TokenBatch, KVCache], AbstractContextManager[Backend]]

MIN_STEPPED_BYTES = 256 << 20
LOGITS_TOKENS = 1 << 15  # of a pass: their intermediates take memory, and a card's kernels take fewer than 2^16
MAX_ADAPTED = 64  # adapters, and batches of several, whose weights are kept
NO_ADAPTERS: Mapping[int, Adapter | None] = MappingProxyType({})
_CLOSED = "this model was closed and its weights were freed; load it again"


class SteppedWeights:
    """Weights that compute at once, and are made faster step by step while they do: see `Backend.prepare_in_steps`.

    Each pass but the first makes a step before it, so that a text begins sooner and goes on without a pause. Small
    weights are made at once.
    """

    def __init__(self, steps: Iterator[ModelWeights], min_stepped_bytes: int = MIN_STEPPED_BYTES) -> None:
        """min_stepped_bytes: smaller models are prepared at once."""
        self.current = next(steps)
        self._steps: Iterator[ModelWeights] | None = steps
        self._lock = ForkLock()
        self._is_used = False
        if self.current.nbytes < min_stepped_bytes:
            self.finished()

    def of_pass(self) -> ModelWeights:
        """For the next pass. While one thread makes a step, others take what there is."""
        if self._steps is not None and self._is_used and self._lock.acquire(blocking=False):
            try:
                self._step()
            finally:
                self._lock.release()
        self._is_used = True
        return self.current

    def finished(self) -> ModelWeights:
        """After all steps."""
        with self._lock:
            while self._steps is not None:
                self._step()
        return self.current

    def _step(self) -> None:
        try:
            self.current = next(self._steps or iter(()))
        except StopIteration:
            self._steps = None
        except ValueError:  # another thread was in the middle of a step when this process was forked
            self._steps = None
        except MemoryError:
            log.warning("no memory for second copies of the weights: the model goes on without, more slowly")
            self._steps = None


class AdaptedWeights:
    """A model's weights as a pass takes them whose tokens have adapters. The last ones are kept: the next step of the
    same sequences takes the same object, and so replays what a backend recorded of it."""

    def __init__(self, be: Backend) -> None:
        self._be = be
        self._lock = ForkLock()
        self._kept: dict[Any, tuple[ModelWeights, ModelWeights]] = {}  # -> the model's weights, and those of the pass

    def of_pass(self, w: ModelWeights, batch: TokenBatch, adapters: Mapping[int, Adapter | None]) -> ModelWeights:
        """The weights for a batch. adapters: of its slots; a slot that is not there has none."""
        of_token = [adapters.get(slot) for slot in batch.slots.tolist()]
        digests = {each.digest: each for each in of_token if each}
        if not digests:
            return w
        models = [self.of_all(w, adapter) for adapter in digests.values()]
        numbers = {digest: number for number, digest in enumerate(digests)}
        choice = np.array([numbers[each.digest] if each else -1 for each in of_token], dtype=np.int32)
        if len(models) == 1 and not choice.any():
            return models[0]
        self._be.check_mixed_adapters()
        wanted = b"" if batch.wanted is None else batch.wanted.tobytes()
        key = id(w), tuple(digests), choice.tobytes(), wanted
        return self._keep(key, w, lambda: select_adapters(w, models, choice, batch.wanted))

    def of_all(self, w: ModelWeights, adapter: Adapter) -> ModelWeights:
        """The weights with the adapter on for every token."""
        return self._keep((id(w), adapter.digest), w, lambda: adapter.put_on(w, self._be.prepare_for))

    def _keep(self, key: Any, w: ModelWeights, make: Callable[[], ModelWeights]) -> ModelWeights:
        with self._lock:
            known = self._kept.pop(key, None)
            if known is None or known[0] is not w:
                known = w, make()
            self._kept[key] = known
            while len(self._kept) > MAX_ADAPTED:
                self._kept.pop(next(iter(self._kept)))
        return known[1]


class LoadedModel:
    """A model that computes. It holds no state between calls; any number of threads may use it."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights | SteppedWeights,
        backend: Backend,
        path: Path | None = None,
        *,
        cache_dtype: str | None = None,
        load_tokenizer: Callable[[], Tokenizer] | None = None,
        load_again: Callable[[str | None], LoadedModel] | None = None,
        texts_path: Path | None = None,
    ) -> None:
        """cache_dtype: of its KV caches; None: the backend's own.  load_tokenizer: called at the first use.
        load_again: see `renew`.  texts_path: beside which sentence-transformers' files are; None: beside `path`."""
        backend.check_config(config)
        self.config, self.backend, self.path = config, backend, path
        self.texts_path = path if texts_path is None else texts_path
        self.context_length = config.context_length
        self.cache_dtype = cache_dtype
        self.watcher: Watcher | None = None  # a profile sets it while it watches
        stepped = weights if isinstance(weights, SteppedWeights) else SteppedWeights(iter([weights]))
        self._weights: SteppedWeights | None = stepped
        self._load_tokenizer = load_tokenizer
        self._load_again = load_again
        self.adapters: dict[str, Adapter] = {}  # that requests may name
        self._adapted = AdaptedWeights(backend)

    def __repr__(self) -> str:
        cfg, name = self.config, self.path.name if self.path is not None else "in memory"
        state = "closed" if self.is_closed else f"backend {self.backend.summary}"
        screened = not self.is_closed and self.head == "screened"
        return (
            f"<bitnet_ref.Model {name}: {cfg.model_type}, {cfg.num_hidden_layers} layers of {cfg.hidden_size}, "
            f"vocab {cfg.vocab_size}, {state}{', screened head' * screened}>"
        )

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._weights is None

    @property
    def weights(self) -> ModelWeights:
        """As `Backend.prepare_model` gives them: a large model makes the last of it while it writes, or here. Raises
        BackendError after `close`."""
        return self._stepped.finished()

    @property
    def _stepped(self) -> SteppedWeights:
        if self._weights is None:
            raise BackendError(_CLOSED)
        return self._weights

    @property
    def head(self) -> str:
        """How greedy and top-k tokens are computed: "screened" (proven bounds on most logits) or "exact" (all)."""
        return "screened" if not self.is_closed and hasattr(self.weights.lm_head, "screen_nbytes") else "exact"

    @lazy_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the model's folder or file. Raises TokenizerError when there is none."""
        return self._read_tokenizer() if self._load_tokenizer is None else self._load_tokenizer()

    def _read_tokenizer(self) -> Tokenizer:
        """That of a model which was made without `load_tokenizer`."""
        raise TokenizerError("this model was not loaded from a file, so it has no tokenizer")

    @lazy_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of the tokenizer's tokens. Raises TokenizerError when there is no tokenizer."""
        from ..tokenizers.vocabulary import Vocabulary

        return Vocabulary(self.tokenizer, self.config.vocab_size)

    def put_adapter(self, name: str, adapter: Adapter) -> None:
        """Let requests name this adapter; one of that name before stays with the requests that have begun.

        Raises ConfigError for a name that is blank or has a colon, for a model that has an adapter on already, and for
        an adapter of the head, which one pass computes for all of its tokens.
        """
        if not name.strip() or ":" in name:
            raise ConfigError(f"expected a name without a colon, got {describe(name)}", field="adapter")
        if any(isinstance(weight, AdaptedLinear) for _, weight in self._stepped.current.linears()):
            message = "this model was loaded with an adapter on; load it with adapter='none', then requests choose"
            raise ConfigError(message, field="adapter")
        if "lm_head" in adapter.terms:
            message = "this adapter changes lm_head, so requests cannot choose it; load the model with adapter=FOLDER"
            raise ConfigError(message, field="adapter")
        self.adapters[name] = adapter

    def find_adapter(self, name: str | None) -> Adapter | None:
        """The adapter of that name. Raises GenerationError."""
        if name is None:
            return None
        if name not in self.adapters:
            known = ", ".join(self.adapters) or "none; add_adapter(name, folder) adds one"
            raise GenerationError(f"there is no adapter {name[:200]!r}; there are: {known}", field="adapter")
        return self.adapters[name]

    def with_adapter(self, name: str | None) -> Self:
        """This model with one of its adapters on for everything, as `load(..., adapter=FOLDER)` gives it, with the same
        weights in memory. None: the model itself. Raises GenerationError."""
        adapter = self.find_adapter(name)
        return self if adapter is None else self._put_on(adapter)

    def _put_on(self, adapter: Adapter) -> Self:
        made = copy.copy(self)
        made._weights = SteppedWeights(iter([self._adapted.of_all(self.weights, adapter)]))
        made.adapters, made._adapted, made.watcher = {}, AdaptedWeights(self.backend), None
        if (again := self._load_again) is not None:
            made._load_again = lambda backend: again(backend)._put_on(adapter)
        return made

    def new_cache(
        self,
        slots: int,
        capacity: int,
        *,
        dtype: str | None = None,
        page_size: int | None = None,
        pages: int | None = None,
    ) -> EngineKVCache:
        """An empty KV cache, in `cache_dtype` unless another dtype is given. See `CacheSpec`."""
        if self.is_closed:
            raise BackendError(_CLOSED)
        if min(slots, capacity) < 0:
            raise ShapeError("KVCache", expected="sizes of at least 0", got=f"{slots} sequences of {capacity} tokens")
        spec = CacheSpec(slots, capacity, dtype or self.cache_dtype, page_size, pages)
        return self.backend.new_cache(self.config, spec)

    def run(
        self,
        batch: TokenBatch,
        cache: KVCache,
        top: Sequence[tuple[int | None, Ids] | None] | None = None,
        path: str | None = None,
        adapters: Mapping[int, Adapter | None] = NO_ADAPTERS,
    ) -> Logits:
        """One pass; see `backends.run.run`. This, `run_greedy` and `run_hidden` are the only ways in which this model
        computes.   adapters: of the batch's slots; a slot without one has none."""
        w = self._weights_of(batch, adapters)
        if self.watcher is None or path is not None:
            return run(self.backend, w, self.config, batch, cache, top, path)
        with self.watcher(self.backend, self.config, batch, cache) as observed:
            return run(observed, w, self.config, batch, cache, top)

    def run_greedy(
        self,
        batch: TokenBatch,
        cache: KVCache,
        steps: GreedyRun,
        adapters: Mapping[int, Adapter | None] = NO_ADAPTERS,
    ) -> Iterator[list[TokenLogits]]:
        """Several passes; see `backends.run.run_greedy`. None while a profile watches, which looks into each pass."""
        if self.watcher is not None:
            return iter(())
        return run_greedy(self.backend, self._weights_of(batch, adapters), self.config, batch, cache, steps)

    def _weights_of(self, batch: TokenBatch, adapters: Mapping[int, Adapter | None]) -> ModelWeights:
        w = self._stepped.of_pass()
        return self._adapted.of_pass(w, batch, adapters) if adapters else w

    def run_hidden(self, batch: TokenBatch, cache: KVCache) -> Floats:
        """One pass without the head, and without a step towards it; see `backends.run.run_hidden`."""
        return run_hidden(self.backend, self._stepped.current, self.config, batch, cache)

    @overload
    def logits(self, token_ids: str | Sequence[int] | NDArray[np.integer]) -> Floats: ...

    @overload
    def logits(self, token_ids: list[str] | Sequence[Sequence[int]]) -> list[Floats]: ...

    def logits(
        self, token_ids: str | Sequence[int] | NDArray[np.integer] | list[str] | Sequence[Sequence[int]]
    ) -> Floats | list[Floats]:
        """One full forward pass (more than LOGITS_TOKENS in several).   token_ids (T,) ints, or a text for the model's
        tokenizer -> (T, V) in the backend's dtype

        A list of token lists or texts gives a list of arrays, each equal to that of its tokens alone.

        Raises GenerationError for an empty list, an id outside the vocabulary, or more tokens than the model's context.
        """
        is_batch = _is_batch(token_ids)
        rows = [self._encode(row) for row in (token_ids if is_batch else [token_ids])]
        cache = self.new_cache(len(rows), max(map(len, rows)))
        inputs = [(slot, 0, row) for slot, row in enumerate(rows)]
        passes = [self.run(TokenBatch.of(parts), cache).all() for parts, _ in split_into_passes(inputs, LOGITS_TOKENS)]
        every = passes[0] if len(passes) == 1 else np.concatenate(passes)
        return np.split(every, np.cumsum([len(row) for row in rows])[:-1]) if is_batch else every

    def run_with_cache(
        self, token_ids: Sequence[int] | str, names_filter: NamesFilter = None
    ) -> tuple[Floats, dict[str, Floats]]:
        """The logits and every named intermediate of a pass, computed op by op (names: `backends/record.py`).

        token_ids: ids, or a text for the model's tokenizer.
        names_filter: None for all, a glob ("blocks.*.attn.hook_pattern"), a list of globs, or a callable.

        Raises GenerationError for a filter that matches none of the model's tensors.
        """
        tokens = self._encode(token_ids)
        recorder = Recorder(self.backend, self.config, names_filter)
        observed = observe(self.backend, recorder)
        cache = self.new_cache(1, len(tokens))
        logits = run(observed, self.weights, self.config, TokenBatch.of([(0, 0, tokens)]), cache).all()
        check_matched(recorder.seen, names_filter)
        return logits, recorder.seen

    def on(self, backend: Backend, *, in_steps: bool = False) -> Self:
        """The same model on another backend, from the weights in memory. in_steps: as a large one is, see
        `SteppedWeights`."""
        w = plain_weights(self.weights)
        layers = []
        for index, layer in enumerate(w.layers):
            prepare = backend.prepare_for(index)
            prepared_linears: dict[str, Any] = {name: linear.each(prepare) for name, linear in layer.linears()}
            layers.append(replace(layer, **prepared_linears))
        head = w.embedding if w.tied else backend.prepare_for(None)(w.lm_head)
        steps = backend.prepare_in_steps(replace(w, layers=tuple(layers), lm_head=head), self.config)
        prepared = SteppedWeights(steps, 0 if in_steps else sys.maxsize)
        settings: dict[str, Any] = {"cache_dtype": self.cache_dtype, "load_tokenizer": self._load_tokenizer}
        settings["texts_path"] = self.texts_path
        made = type(self)(self.config, prepared, backend, self.path, **settings)
        made.adapters = self.adapters
        return made

    def renew(self, backend: str | None = None) -> LoadedModel:
        """The same model on a new backend of that name, by default of this one's kind: read from its files again,
        because the weights of a device that failed are lost; where it has no files, made from the weights in memory.

        Raises what `load` raises.
        """
        if self._load_again is not None:
            made = self._load_again(backend)
            made.adapters = self.adapters
            return made
        from . import choose_backend

        be = self.backend
        return self.on(choose_backend(backend or be.name, dtype=be.dtype.name, threads=be.threads))

    def _encode(self, text: Any) -> NDArray[np.int64]:
        """The checked token ids of a text, or of token ids."""
        return self.check_tokens(self.tokenizer.encode(text) if isinstance(text, str) else text)

    def check_tokens(self, token_ids: Any, *, any_length: bool = False) -> NDArray[np.int64]:
        """token_ids as an int64 array: non-empty, within the vocabulary and (unless `any_length`) the context."""
        try:
            tokens = np.asarray(token_ids)
        except (ValueError, TypeError, OverflowError):  # lists of different lengths, and what is not a number
            tokens = np.empty(0)
        if tokens.ndim != 1 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
            raise GenerationError(f"expected a non-empty list of token ids, got {describe(token_ids)}")
        if tokens.size > self.context_length and not any_length:
            raise ContextOverflow(
                f"{tokens.size} tokens do not fit the model's context of {self.context_length}; shorten them"
            )
        bad = np.flatnonzero((tokens < 0) | (tokens >= self.config.vocab_size))
        if bad.size:
            raise GenerationError(
                f"token id {tokens[bad[0]]} at index {bad[0]} is not in the vocabulary of {self.config.vocab_size}"
            )
        return tokens.astype(np.int64)

    def close(self) -> None:
        """Free the weights and everything the backend holds. Any later use raises BackendError."""
        self._weights = None
        self._adapted = AdaptedWeights(self.backend)
        gc.collect()  # the requests of an engine are cycles that hold the weights, and its cache on the backend
        self.backend.close()


def _is_batch(token_ids: Any) -> bool:
    """Whether these are rows: a list of texts, lists or arrays, or a two-dimensional array."""
    if isinstance(token_ids, np.ndarray):
        return token_ids.ndim == 2 and len(token_ids) > 0
    return (
        isinstance(token_ids, list | tuple)
        and len(token_ids) > 0
        and isinstance(token_ids[0], str | list | tuple | np.ndarray)
    )
