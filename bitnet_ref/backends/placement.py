"""Decides which layers of a model each GPU computes, and which ones the CPU.

The last layers and the head go to GPUs and the first layers to the CPU, so that the residual stream crosses to a GPU
once. If a GPU cannot even hold the head, it is the other way round.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ..errors import BackendUnavailable, OutOfMemory
from ..reference.config import ModelConfig
from ..reference.weights import linear_name
from . import choose_backend, choose_cpu
from .backend import Backend
from .options import ComputeOptions, DeviceOptions

if TYPE_CHECKING:
    from .cuda.backend import CupyBackend

FREE_SHARE = 50  # 1/50 of a GPU's memory stays free for the kernels themselves and the pool's gaps

# "embedding" or the name of a linear -> bytes of an element in the file; None: it is ternary
ElementBytes = Callable[[str], int | None]


def open_backends(compute: ComputeOptions, cards: DeviceOptions) -> list[Backend]:
    """Open the backend with `choose_backend`; "cupy" once for each GPU.

    Raises BackendUnavailable for a missing GPU; with "auto" that is a warning.
    """
    asked = cards.devices is not None or cards.gpu_layers not in (None, 0)
    if asked and compute.backend not in ("auto", "cupy"):
        message = f"devices and gpu_layers say what cards compute: they are for cupy, not for {compute.backend!r}"
        raise BackendUnavailable(message, mentions=["devices", "gpu_layers"])
    options: dict[str, Any] = {"dtype": compute.dtype, "threads": compute.threads, "head": compute.head}
    options["memory_limit"] = cards.memory_limit
    numbers = cast("tuple[int, ...] | None", cards.devices) or (0,)
    first = choose_backend(compute.backend, device=numbers[0], **options)
    if first.name != "cupy":
        if asked:
            warnings.warn(f"there is no card to take: {first.name} computes all layers on the CPU", stacklevel=3)
        return [first]
    return [first, *(choose_backend("cupy", device=number, **options) for number in numbers[1:])]


def assign_layers(
    backends: Sequence[Backend],
    config: ModelConfig,
    element_bytes: ElementBytes,
    options: DeviceOptions,
    cache_dtype: str | None = None,
) -> Backend:
    """The backend for this model: the only one of `backends` if it can hold all of it, else a `SplitBackend`.

    backends: from `open_backends`. GPUs share the layers in this order.

    Warns when layers stay on the CPU without being asked to. Raises OutOfMemory when the requested layers do not fit.
    """
    if backends[0].name != "cupy":
        return backends[0]
    from .split import LayerRun, SplitBackend

    cards = cast("Sequence[CupyBackend]", backends)
    total, tokens = config.num_hidden_layers, options.tokens(config)
    costs = Costs.of(config, element_bytes, cards[0], cache_dtype, tokens)
    rooms = [_room(card, costs.working) for card in cards]
    for wanted, with_head in _choices(options.gpu_layers, total):
        if (counts := divide_layers(costs.of_run(wanted, with_head, len(cards) == 1), rooms)) is not None:
            break
    else:
        if options.gpu_layers not in (None, 0):
            layers = f"gpu_layers={options.gpu_layers!r}"
            message = f"{layers}: {_too_small(cards, options.gpu_layers, costs, tokens)}"
            raise OutOfMemory(message, mentions=[layers, "gpu_layers", "cache_tokens", "gpu_layers"])
        wanted, with_head, counts = 0, False, [0] * len(cards)
    runs: list[tuple[Backend, int]] = [(card, count) for card, count in zip(cards, counts, strict=True) if count]
    if wanted < total:
        rest = choose_backend(choose_cpu(), threads=cards[0].threads, head=cards[0].head)
        runs.insert(0 if with_head else len(runs), (rest, total - wanted))
        if options.gpu_layers is None:
            warnings.warn(_partly_on_cpu(cards, wanted, with_head, rest.name, costs, tokens), stacklevel=4)
    for card, count in zip(cards, counts, strict=True):
        if not count:
            card.close()
    if len(runs) == 1:
        return runs[0][0]
    stops = [sum(count for _, count in runs[: i + 1]) for i in range(len(runs))]
    return SplitBackend([LayerRun(be, stop - count, stop) for (be, count), stop in zip(runs, stops, strict=True)])


def _choices(asked: int | str | None, total: int) -> Iterator[tuple[int, bool]]:
    """(layers on GPUs, whether the head is there too), the best first. A head goes with at least one layer."""
    for with_head in (True, False) if asked != "all" else (True,):
        max_layers = total if with_head else total - 1
        if asked is None:
            yield from ((count, with_head) for count in range(max_layers, 0, -1))
        elif 0 < (count := total if asked == "all" else min(int(asked), total)) <= max_layers:
            yield count, with_head


def divide_layers(costs: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """How many of the layers, in order, each GPU takes, so that the fullest GPU is as little full as possible.

    costs: bytes of each layer. rooms: free bytes of each GPU. None if they do not fit.

    >>> divide_layers([2, 2, 2, 2, 2, 2], [100, 100])
    [3, 3]
    >>> divide_layers([2, 2, 2, 2, 2, 7], [20, 10])
    [5, 1]
    >>> divide_layers([2, 2, 2], [3, 2]) is None
    True
    """
    best = _fill_in_order(costs, rooms)
    low, high = 0, max(rooms)  # bytes of the largest GPU that may be used; the others may use the same share
    while best is not None and high - low > 1:
        middle = (low + high) // 2
        counts = _fill_in_order(costs, [room * middle // max(rooms) for room in rooms])
        low, high = (middle, high) if counts is None else (low, middle)
        best = counts or best
    return best


def _fill_in_order(costs: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """How many layers each GPU takes if each is filled before the next; None if not all fit."""
    counts, at = [], 0
    for room in rooms:
        first = at
        while at < len(costs) and costs[at] <= room:
            room, at = room - costs[at], at + 1
        counts.append(at - first)
    return counts if at == len(costs) else None


@dataclass(frozen=True)
class Costs:
    """Bytes on a GPU: each layer with its cache, the head, the embedding if it is another matrix, and the scratch
    buffers of a pass (`working`)."""

    layers: tuple[int, ...]
    head: int
    embedding: int
    working: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        element_bytes: ElementBytes,
        card: CupyBackend,
        cache_dtype: str | None,
        tokens: int,
    ) -> Costs:
        from .cuda.footprint import cache_bytes, layer_bytes, weight_bytes, working_bytes

        narrow = card.precision != "float32"

        def itemsize(name: str) -> int | None:
            stored = element_bytes(name)
            return None if stored is None else 2 if narrow or stored == 2 else 4

        cache = cache_bytes(config, cache_dtype or card.precision, tokens)
        layers = tuple(
            cache + layer_bytes(config, lambda short, index=index: itemsize(linear_name(index, short)))  # type: ignore[misc]
            for index in range(config.num_hidden_layers)
        )
        table_shape = (config.vocab_size, config.hidden_size)
        table = weight_bytes(table_shape, itemsize("embedding"), bias=False)
        if config.tie_word_embeddings:
            return cls(layers, table, 0, working_bytes(config, tokens))
        head = weight_bytes(table_shape, itemsize("lm_head"), bias=False)
        return cls(layers, head, table, working_bytes(config, tokens))

    def of_run(self, wanted: int, with_head: bool, alone: bool) -> list[int]:
        """Bytes of each layer that goes to GPUs; the last one includes the head. alone: one GPU, which also embeds."""
        if not with_head:
            return list(self.layers[:wanted])
        *others, last = self.layers[len(self.layers) - wanted :]
        whole = alone and wanted == len(self.layers)
        return [*others, last + self.head + whole * self.embedding]


def _room(card: CupyBackend, working: int) -> int:
    """Bytes of the GPU that layers may take."""
    info = card.ws.device.memory()
    free = info.free - info.total // FREE_SHARE
    if info.limit is not None:
        free = min(free, info.limit - info.used - info.limit // FREE_SHARE)
    return max(0, free - working)


def _partly_on_cpu(
    cards: Sequence[CupyBackend], wanted: int, with_head: bool, rest: str, costs: Costs, tokens: int
) -> str:
    """18 of 30 layers fit in 2.0 GiB of card 0 beside the head, a cache of ..."""
    beside, others = ("the head, ", "") if with_head else ("", " and the head")
    left = len(costs.layers) - wanted
    are = "are" if left > 1 or others else "is"
    return (
        f"{wanted} of {len(costs.layers)} layers fit in {_memory_in_words(cards)} beside {beside}a cache of {tokens} "
        f"tokens and {_size(costs.working)} to compute in; {left}{others} {are} computed by {rest} on the CPU"
    )


def _too_small(cards: Sequence[CupyBackend], asked: int | str | None, costs: Costs, tokens: int) -> str:
    count = len(costs.layers) if asked == "all" else min(int(asked or 0), len(costs.layers))
    needed = _size(sum(costs.layers[len(costs.layers) - count :]) + costs.head + costs.working)
    return (
        f"{count} layers and the head take {needed} with a cache of {tokens} tokens, and there is "
        f"not room for them in {_memory_in_words(cards)}; give more memory or cards, ask for fewer gpu_layers or "
        "cache_tokens, or leave gpu_layers out: what does not fit then stays on the CPU"
    )


def _memory_in_words(cards: Sequence[CupyBackend]) -> str:
    return " and ".join(f"{_size(card.memory()[1] or 0)} of card {card.index}" for card in cards)


def _size(nbytes: int) -> str:
    """2147483648 -> "2.0 GiB" """
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
