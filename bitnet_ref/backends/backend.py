"""`Backend`: the plain ops of the reference plus the life cycle of what computes them. It is the numpy backend too.

A faster backend subclasses it. It overrides ops (arrays in, arrays out) or whole blocks, and names its execution paths:
the ways in which it computes a pass. `run.py` is the door to all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendUnavailable, ConfigError, ShapeError
from ..reference.cache import KVCache, TokenBatch
from ..reference.config import ModelConfig
from ..reference.layers import Array, Floats
from ..reference.model import PlainBackend, final_hidden
from ..reference.weights import LinearWeight, ModelWeights
from ..system.forks import ForkLock
from ..system.memory import available_bytes, memory_bytes
from ..system.threads import resolve_threads
from .paged_cache import CACHE_DTYPES, CacheSpec, EngineKVCache, PagedKVCache

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

HEADS = ("auto", "exact", "screened")
PROMPT_TOKENS = 512  # of one pass

Ids = Sequence[int] | NDArray[np.int64]


class HeadNeed(NamedTuple):
    """What one token needs of the head: the k largest logits (None: all logits), and those of the ids `also`."""

    k: int | None = None
    also: Ids = ()


class HeadRows(NamedTuple):
    """Logits of one token, each equal to that of the whole head to the bit.

    With `HeadNeed(k)` every logit among the k largest is there, and every tie of the k-th.
    """

    ids: NDArray[np.int64]  # (n,) ascending
    values: Floats  # (n,)
    bounds: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None  # (V,) lower and upper bound of every logit


@dataclass(frozen=True, eq=False)
class GreedyRun:
    """What several steps in a row need to know beforehand, of n sequences that decode: greedy ones, unless `draws`.

    An ended sequence repeats its last step until all return: when an eighth of them have ended, when bell[0] is not 0,
    or after `steps`.
    """

    steps: int
    left: NDArray[np.int64]  # (n,): how many tokens each sequence still gets
    ends: NDArray[np.int64]  # ids that end a sequence
    bell: NDArray[np.uint8]  # (1,), set by any thread
    draws: Draws | None = None


class DrawRule(NamedTuple):
    """How a token is drawn; by default without limits."""

    temperature: float  # 0: the largest logit
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, eq=False)
class Draws:
    """How n sequences draw their tokens, as `Backend.draw`. Where rounding could decide one, the run ends before it."""

    rules: NDArray[np.float64]  # (n, 4): a `DrawRule` of each
    uniforms: NDArray[np.float64]  # (steps, n), from [0, 1)


class GreedySteps(NamedTuple):
    """The steps of a `GreedyRun` that were computed; none of them met NaN or Inf."""

    tokens: NDArray[np.int64]  # (steps, n)
    values: NDArray[np.float32]  # (steps, n): their logits
    states: NDArray[np.float32]  # (steps, n, D): the head's inputs


class Backend(PlainBackend):
    """The numpy backend. `dtype` float32 is the contract; float64 runs the same text to measure float32's error."""

    name = "numpy"
    dtypes: tuple[str, ...] = ("float32", "float64")
    cache_dtypes: tuple[str, ...] = ("float64", *CACHE_DTYPES)
    paths: tuple[str, ...] = ("ops",)  # names of the ways through a pass, the slowest and plainest first
    weight_kinds: tuple[type, ...] = ()  # of what `prepared_layout` names: the classes of prepared weights
    takes_ruled = True  # whether it multiplies by ggml's rule, `families/block_rule`
    screens_head = False  # whether `head_rows` can do without most rows of the head

    def __init__(self, dtype: str = "float32", threads: int | None = None, *, head: str = "auto") -> None:
        """Raises ConfigError for a dtype or head that this backend does not have."""
        if dtype not in self.dtypes:
            names = " or ".join(self.dtypes)
            raise ConfigError(f"backend {self.name!r} computes in {names}, got {dtype!r}", field="dtype")
        self.dtype = np.dtype(dtype)
        self.threads = resolve_threads(threads)
        if head not in HEADS:
            raise BackendUnavailable(f"expected one of {', '.join(HEADS)}, got {head!r}", field="head")
        if head == "screened" and not self.screens_head:
            message = f"backend {self.name!r} computes the whole head; head='screened' is for 'cython'"
            raise BackendUnavailable(message, mentions=["head='screened'"])
        self.head = head
        self.fuses = True  # whether blocks may be computed as a whole; see `op_by_op`

    @property
    def summary(self) -> str:
        """What computes, in a few words."""
        return self.name

    # -- weights -------------------------------------------------------------------------------------------------------

    def check_config(self, config: ModelConfig) -> None:
        """Raises BackendUnavailable for a model with an operation that this backend does not have."""

    def check_mixed_adapters(self) -> None:
        """Raises BackendUnavailable where tokens of one batch cannot have different adapters."""

    def prepare(self, w: LinearWeight) -> LinearWeight:
        """A linear's weight in the layout that this backend computes from. Called once per weight while loading."""
        return w

    def prepare_for(self, layer: int | None) -> Callable[[LinearWeight], LinearWeight]:
        """`prepare` of the backend that computes this layer (None: the head)."""
        return self.prepare

    def pack_plane(self, plane: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        """What `formats.packing.pack_from_hf` gives, compiled. None: not done here, or the plane holds a code 3."""
        return None

    def prepare_model(self, w: ModelWeights, cfg: ModelConfig) -> ModelWeights:
        """All weights, each linear prepared, plus what the backend adds to the model as a whole."""
        return w

    def prepare_in_steps(self, w: ModelWeights, cfg: ModelConfig) -> Iterator[ModelWeights]:
        """`prepare_model` in steps: weights that can compute, then the same or faster ones, and at last those that
        `prepare_model` gives. All of them compute the same bits."""
        yield self.prepare_model(w, cfg)

    def prepared_layout(self) -> str | None:
        """Names the layout that `prepare` and `prepare_model` make; None when it is not worth keeping on disk."""
        return None

    def check_prepared(self, w: ModelWeights) -> None:
        """Raises ShapeError unless `weight_kinds` in weights from disk have the shapes that the kernels trust."""

    def other_layouts(self) -> dict[str, Callable[[], Backend]]:
        """Constructors of backends that differ from this one in the layout of ternary weights only, by its name."""
        return {}

    # -- a pass --------------------------------------------------------------------------------------------------------

    def hidden(
        self, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache, path: str | None = None
    ) -> Floats:
        """`final_hidden` of the batch by the named execution path, or by the fastest that applies.   -> (wanted, D)

        A path that does not apply to this batch or model falls back to the one before it in `paths`.
        """
        return final_hidden(self, w, cfg, self.place(batch), cache)

    def greedy_steps(
        self, w: ModelWeights, cfg: ModelConfig, batch: TokenBatch, cache: KVCache, run: GreedyRun
    ) -> GreedySteps | None:
        """Passes one after another, of which each takes the tokens that the logits of the one before choose.

        batch: the first one's, a token of each sequence. None: this backend takes them one by one, or must now.
        """
        return None

    def op_by_op(self) -> Self:
        """The same backend, with its blocks composed from its own ops: the path "ops"."""
        made = copy.copy(self)
        made.fuses = False
        return made

    def embed_on_host(self, w: LinearWeight, tokens: NDArray[np.int64]) -> Floats:
        """The embeddings as a NumPy array, of a table in the host's memory.   tokens (N,) -> (N, D)"""
        return PlainBackend.embed(self, w, tokens)

    def head_rows(self, x: Floats, w: LinearWeight, needs: Sequence[HeadNeed]) -> list[HeadRows]:
        """What each token of x (N, D) needs of the logits. Here all of them; see `HeadRows`."""
        logits = self.to_host(self.lm_head(x, w))
        ids = np.arange(logits.shape[1])
        return [HeadRows(ids, row) for row in logits]

    def draw(self, logits: Floats, rule: DrawRule, uniform: float) -> int | None:
        """The token for a number in [0, 1) from softmax(logits / temperature) within the rule's limits, as
        `generation.sampling` draws it; None where that must draw.   logits (V,)"""
        return None

    def running(self) -> AbstractContextManager[None]:
        """The context of every pass: here it limits NumPy's BLAS to `threads`."""
        return blas_threads(self.threads)

    def place(self, batch: TokenBatch) -> TokenBatch:
        """The batch with its arrays where the ops take them."""
        return batch

    def from_host(self, array: Array) -> Array:
        """A NumPy array as the ops take it: on a card, a copy there."""
        return array

    def to_host(self, array: Array) -> Array:
        """An op's result as a NumPy array. A card waits for it here, and raises the NumericsError of its kernels."""
        return array

    def synchronize(self) -> None:
        """Wait until everything that was launched has been computed, for timing."""

    # -- memory --------------------------------------------------------------------------------------------------------

    def choose_cache_dtype(self, dtype: str | None) -> str:
        """The dtype of a cache made with this setting; None is the backend's own. Raises ShapeError."""
        chosen = self.dtype.name if dtype is None else dtype
        if chosen not in self.cache_dtypes:
            expected = f"cache dtype {', '.join(self.cache_dtypes[:-1])} or {self.cache_dtypes[-1]}"
            raise ShapeError(f"backend {self.name}", expected=expected, got=repr(chosen))
        return chosen

    def new_cache(self, config: ModelConfig, spec: CacheSpec) -> EngineKVCache:
        """An empty KV cache that this backend's ops append to and read. Raises ShapeError, OutOfMemory."""
        dtype = np.dtype(self.choose_cache_dtype(spec.dtype))
        if spec.page_size is None and spec.pages is None and dtype.itemsize > 2:
            return EngineKVCache(config, spec.slots, spec.capacity, dtype)
        return PagedKVCache(config, spec, dtype)

    def memory(self) -> tuple[int | None, int | None]:
        """Bytes in use and bytes free where the arrays lie; here the process and the host. None where unknown."""
        return memory_bytes(), available_bytes()

    def utilization(self) -> float | None:
        """The share of the last second or so in which the card computed, for anyone. None where unknown."""
        return None

    def prompt_tokens(self, config: ModelConfig) -> int:
        """How many tokens of a prompt one pass takes by default: it bounds the memory of a long prompt."""
        return PROMPT_TOKENS

    def close(self) -> None:
        """Free what the backend holds outside this process's memory. It cannot compute afterwards."""


@contextmanager
def blas_threads(threads: int) -> Iterator[None]:
    """NumPy's BLAS uses at most so many threads in the `with` block, and as many as before after it.

    The setting belongs to the process. Of several Python threads in such a block the lowest count holds, and the last
    one to leave restores the original count; if each restored its own, another's limit could remain.
    """
    with _blas.lock:
        if not _blas.inside:
            _blas.before = _blas.counts()
        _blas.inside.append(threads)
        _blas.apply()
    try:
        yield
    finally:
        with _blas.lock:
            _blas.inside.remove(threads)
            _blas.apply()


class _Blas:
    """The BLAS libraries in this process, and the limits in force."""

    def __init__(self) -> None:
        self.lock = ForkLock()
        self.inside: list[int] = []
        self.before: list[int] = []

    @staticmethod
    @cache
    def libraries() -> ThreadpoolController:
        import numpy  # noqa: F401  # a library that is not loaded is not found
        from threadpoolctl import ThreadpoolController

        return ThreadpoolController().select(user_api="blas")

    def counts(self) -> list[int]:
        return [library.get_num_threads() for library in self.libraries().lib_controllers]

    def apply(self) -> None:
        for library, before in zip(self.libraries().lib_controllers, self.before, strict=True):
            wanted = min([before, *self.inside])
            if library.get_num_threads() != wanted:
                library.set_num_threads(wanted)


_blas = _Blas()


def plain_weights(w: ModelWeights) -> ModelWeights:
    """The same weights as the reference takes them, out of whatever layout a backend has given them."""
    return w.map_linears(lambda weight: weight.plain())
