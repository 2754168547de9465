"""Where a model's layers go: how many of them a card can hold, how several cards share them, and who has the rest.

The last layers go to cards, with the head behind them, and the first ones to the processor, so that the residual stream
crosses to a card once. Only where a card cannot even hold the head it is the other way round.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ..errors import BackendUnavailable, OutOfMemory
from ..formats.checkpoint import Checkpoint, is_ternary, linear_name, linear_shape
from . import choose_backend, choose_cpu
from .backend import Backend

if TYPE_CHECKING:
    from .cuda.backend import CupyBackend

MOST_CACHE_TOKENS = 4096  # that room is left for, where nobody says how many
KEPT_FREE = 50  # one part of so many of a card's memory: for the kernels themselves, and the pool's gaps


@dataclass(frozen=True)
class Placement:
    """What the user says about it. Raises BackendUnavailable for what cannot be meant.

    devices: numbers of the cards; None: card 0.
    gpu_layers: so many layers on cards, or "all", or else OutOfMemory; None: as many as fit.
    cache_tokens: tokens of KV cache that room is left for; None: the model's context, at most `MOST_CACHE_TOKENS`.
    """

    devices: tuple[int, ...] | None = None
    gpu_layers: int | str | None = None
    cache_tokens: int | None = None

    @classmethod
    def of(
        cls, devices: int | Sequence[int] | None, gpu_layers: int | str | None, cache_tokens: int | None
    ) -> Placement:
        """From the arguments of `load`."""
        numbers = (devices,) if isinstance(devices, int) else None if devices is None else tuple(devices)
        wrong = numbers is not None and not (numbers and all(_whole(number, 0) for number in numbers))
        if wrong or len({*(numbers or ())}) < len(numbers or ()):
            raise BackendUnavailable(f"devices: expected different numbers of cards like [0, 1], got {devices!r}")
        if gpu_layers not in (None, "all") and not _whole(gpu_layers, 0):
            raise BackendUnavailable(f"gpu_layers: expected a number of layers, or 'all', got {gpu_layers!r}")
        if cache_tokens is not None and not _whole(cache_tokens, 1):
            raise BackendUnavailable(f"cache_tokens: expected a number of tokens, got {cache_tokens!r}")
        return cls(numbers, gpu_layers, cache_tokens)

    def tokens(self, checkpoint: Checkpoint) -> int:
        """Of cache that there is to be room for."""
        return self.cache_tokens or min(checkpoint.config.context_length, MOST_CACHE_TOKENS)


def opened(name: str, placement: Placement, memory_limit: int | str | None = None, **how: Any) -> list[Backend]:
    """The backend of that name, as `choose_backend` opens it; of "cupy" one for each of the cards that are asked for.

    how: its other arguments. Cards that are not there are BackendUnavailable, but for "auto", which warns.
    """
    asked = placement.devices is not None or placement.gpu_layers not in (None, 0)
    if asked and name not in ("auto", "cupy"):
        raise BackendUnavailable(f"devices and gpu_layers say what cards compute: they are for cupy, not for {name!r}")
    numbers = placement.devices or (0,)
    first = choose_backend(name, memory_limit=memory_limit, device=numbers[0], **how)
    if first.name != "cupy":
        if asked:
            warnings.warn(f"there is no card to take: {first.name} computes all layers on the CPU", stacklevel=3)
        return [first]
    return [first, *(choose_backend("cupy", memory_limit=memory_limit, device=n, **how) for n in numbers[1:])]


def _whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def placed(
    backends: Sequence[Backend], checkpoint: Checkpoint, placement: Placement, cache_dtype: str | None = None
) -> Backend:
    """The backend that computes this model: the only one there is, if it holds all of it, else a `SplitBackend`.

    backends: what `opened` gave. Cards share the layers in this order.

    Warns when layers are kept on the CPU and nobody asked for that. Raises OutOfMemory when layers were asked for that
    do not fit.
    """
    if backends[0].name != "cupy":
        return backends[0]
    from .split import LayerRun, SplitBackend

    cards = cast("Sequence[CupyBackend]", backends)
    total, tokens = checkpoint.config.num_hidden_layers, placement.tokens(checkpoint)
    costs = Costs.of(checkpoint, cards[0], cache_dtype, tokens)
    rooms = [_room(card, costs.working) for card in cards]
    for wanted, with_head in _choices(placement.gpu_layers, total):
        if (counts := divided(costs.of_run(wanted, with_head, len(cards) == 1), rooms)) is not None:
            break
    else:
        if placement.gpu_layers not in (None, 0):
            raise OutOfMemory(_too_small(cards, placement.gpu_layers, costs, tokens))
        wanted, with_head, counts = 0, False, [0] * len(cards)
    runs: list[tuple[Backend, int]] = [(card, count) for card, count in zip(cards, counts, strict=True) if count]
    if wanted < total:
        rest = choose_backend(choose_cpu(), threads=cards[0].threads, head=cards[0].head)
        runs.insert(0 if with_head else len(runs), (rest, total - wanted))
        if placement.gpu_layers is None:
            warnings.warn(_kept(cards, wanted, with_head, rest.name, costs, tokens), stacklevel=4)
    for card, count in zip(cards, counts, strict=True):
        if not count:
            card.close()
    if len(runs) == 1:
        return runs[0][0]
    stops = [sum(count for _, count in runs[: i + 1]) for i in range(len(runs))]
    return SplitBackend([LayerRun(be, stop - count, stop) for (be, count), stop in zip(runs, stops, strict=True)])


def _choices(asked: int | str | None, total: int) -> Iterator[tuple[int, bool]]:
    """(layers on cards, whether the head is there too), the best first. What has the head has a layer too."""
    for with_head in (True, False) if asked != "all" else (True,):
        most = total if with_head else total - 1
        if asked is None:
            yield from ((count, with_head) for count in range(most, 0, -1))
        elif 0 < (count := total if asked == "all" else min(int(asked), total)) <= most:
            yield count, with_head


def divided(costs: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """How many of the layers, in order, each card takes, so that the fullest is as little full as can be.

    costs: bytes of each layer. rooms: bytes of each card. None: they do not fit.

    >>> divided([2, 2, 2, 2, 2, 2], [100, 100])
    [3, 3]
    >>> divided([2, 2, 2, 2, 2, 7], [20, 10])
    [5, 1]
    >>> divided([2, 2, 2], [3, 2]) is None
    True
    """
    best = _filled(costs, rooms)
    low, high = 0, max(rooms)  # of the largest card, so many bytes; of the others the same share
    while best is not None and high - low > 1:
        middle = (low + high) // 2
        found = _filled(costs, [room * middle // max(rooms) for room in rooms])
        low, high = (middle, high) if found is None else (low, middle)
        best = found or best
    return best


def _filled(costs: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """How many layers each card takes when each is filled before the next; None: not all of them."""
    counts, at = [], 0
    for room in rooms:
        first = at
        while at < len(costs) and costs[at] <= room:
            room, at = room - costs[at], at + 1
        counts.append(at - first)
    return counts if at == len(costs) else None


@dataclass(frozen=True)
class Costs:
    """Bytes on a card: of each layer with its cache, of the head, of the embedding if it is another matrix, and of what
    a pass needs besides."""

    layers: tuple[int, ...]
    head: int
    embedding: int
    working: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, card: CupyBackend, cache_dtype: str | None, tokens: int) -> Costs:
        from .cuda.footprint import cache_bytes, layer_bytes, weight_bytes, working_bytes

        config, narrow, sizes = checkpoint.config, card.precision != "float32", dict[str, int]()

        def itemsize(name: str) -> int | None:
            if name != "embedding" and is_ternary(config, name):
                return None
            short = name.rpartition(".")[2]  # of one dtype in all layers
            if not narrow and short not in sizes:
                sizes[short] = 2 if checkpoint.dense_dtype(name).itemsize == 2 else 4
            return 2 if narrow else sizes[short]

        cache = cache_bytes(config, cache_dtype or card.precision, tokens)
        layers = tuple(
            cache + layer_bytes(config, lambda short, index=index: itemsize(linear_name(index, short)))  # type: ignore[misc]
            for index in range(config.num_hidden_layers)
        )
        table = weight_bytes(linear_shape(config, "lm_head"), itemsize("embedding"), bias=False)
        if config.tie_word_embeddings:
            return cls(layers, table, 0, working_bytes(config, tokens))
        head = weight_bytes(linear_shape(config, "lm_head"), itemsize("lm_head"), bias=False)
        return cls(layers, head, table, working_bytes(config, tokens))

    def of_run(self, wanted: int, with_head: bool, alone: bool) -> list[int]:
        """Of each layer that goes to cards; the head counts to the last one. alone: on one card, which then embeds."""
        if not with_head:
            return list(self.layers[:wanted])
        *others, last = self.layers[len(self.layers) - wanted :]
        whole = alone and wanted == len(self.layers)
        return [*others, last + self.head + whole * self.embedding]


def _room(card: CupyBackend, working: int) -> int:
    """Bytes of the card that are there for layers."""
    info = card.ws.device.memory()
    free = info.free - info.total // KEPT_FREE
    if info.limit is not None:
        free = min(free, info.limit - info.used - info.limit // KEPT_FREE)
    return max(0, free - working)


def _kept(cards: Sequence[CupyBackend], wanted: int, with_head: bool, rest: str, costs: Costs, tokens: int) -> str:
    """18 of 30 layers fit in 2.0 GiB of card 0 beside the head, a cache of ..."""
    beside, others = ("the head, ", "") if with_head else ("", " and the head")
    left = len(costs.layers) - wanted
    are = "are" if left > 1 or others else "is"
    return (
        f"{wanted} of {len(costs.layers)} layers fit in {_words(cards)} beside {beside}a cache of {tokens} tokens and "
        f"{_size(costs.working)} to compute in; {left}{others} {are} computed by {rest} on the CPU"
    )


def _too_small(cards: Sequence[CupyBackend], asked: int | str | None, costs: Costs, tokens: int) -> str:
    count = len(costs.layers) if asked == "all" else min(int(asked or 0), len(costs.layers))
    needed = _size(sum(costs.layers[len(costs.layers) - count :]) + costs.head + costs.working)
    return (
        f"gpu_layers={asked!r}: {count} layers and the head take {needed} with a cache of {tokens} tokens, and there "
        f"is not room for them in {_words(cards)}; give more memory or cards, ask for fewer gpu_layers or "
        "cache_tokens, or leave gpu_layers out: what does not fit then stays on the CPU"
    )


def _words(cards: Sequence[CupyBackend]) -> str:
    return " and ".join(f"{_size(card.memory()[1] or 0)} of card {card.index}" for card in cards)


def _size(nbytes: int) -> str:
    """2147483648 -> "2.0 GiB" """
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
