"""What a running engine did: which slot worked on which request in which step, and on how many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .style import PALE, SERIES, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class SlotWork(Protocol):
    """One request's tokens in a step."""

    @property
    def request_id(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def kind(self) -> str: ...  # "prefill" or "decode"
    @property
    def tokens(self) -> int: ...


class EngineStep(Protocol):
    @property
    def start_s(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def parts(self) -> Sequence[SlotWork]: ...
    @property
    def waiting(self) -> int: ...


def timeline(steps: Sequence[EngineStep], *, by_step: bool = False) -> Figure:
    """A row for each slot, a box for each step it took part in, a colour for each request, with its number where it
    begins; prompts are hatched. Below: tokens in the step, and waiting requests.

    by_step: all steps are equally wide, instead of by the clock.
    """
    slots = sorted({part.slot for step in steps for part in step.parts})
    rows = {slot: row for row, slot in enumerate(slots)}
    zero = steps[0].start_s if steps else 0.0
    places = [
        (i, 1.0) if by_step else ((step.start_s - zero) * 1e3, step.seconds * 1e3) for i, step in enumerate(steps)
    ]
    size = (11, 1.9 + 0.32 * len(slots))
    ratios = {"height_ratios": [max(1.0, 0.32 * len(slots)), 1.0]}
    figure, axes = new_figure(2, size=size, sharex=True, gridspec_kw=ratios)
    top, below = axes[:, 0]
    named: set[tuple[int, int]] = set()
    for step, (left, width) in zip(steps, places, strict=True):
        for part in step.parts:
            prefill, row = part.kind == "prefill", rows[part.slot]
            colour = SERIES[part.request_id % len(SERIES)]
            box = {"color": colour, "ec": "white", "lw": 0.4, "height": 0.86, "alpha": 0.55 if prefill else 1.0}
            top.barh(row, width, left=left, hatch="////" if prefill else None, **box)
            if (part.request_id, part.slot) not in named:
                named.add((part.request_id, part.slot))
                top.text(left, row - 0.02, f" {part.request_id}", ha="left", va="center", size=8, color="black")
    top.set(ylabel="slot", ylim=(len(slots) - 0.4, -0.6))
    top.set_yticks(range(len(slots)), [str(slot) for slot in slots])
    lefts, widths = [left for left, _ in places], [width for _, width in places]
    tokens = [sum(part.tokens for part in step.parts) for step in steps]
    below.bar(lefts, tokens, width=widths, align="edge", color=PALE, ec="white", lw=0.3, label="tokens in the step")
    below.step(lefts, [step.waiting for step in steps], where="post", color=SERIES[6], lw=1.2, label="requests waiting")
    below.set(xlabel="step" if by_step else "ms", ylabel="tokens, requests")
    below.legend(frameon=False, fontsize=8, loc="upper right")
    return figure
