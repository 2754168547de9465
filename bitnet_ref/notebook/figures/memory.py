"""Bytes of a KV cache, by policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from numpy.typing import NDArray

from .style import SERIES, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def memory_lines(panels: Sequence[tuple[str, Sequence[int], Mapping[str, NDArray]]]) -> Figure:
    """Megabytes over tokens. panels: (title, tokens (n,), {policy: bytes (n,)}) each."""
    figure, axes = new_figure(1, len(panels), size=(5.5 * len(panels), 3.4))
    for ax, (title, tokens, policies) in zip(axes[0], panels, strict=True):
        for number, (policy, nbytes) in enumerate(policies.items()):
            ax.plot(tokens, nbytes / 1e6, color=SERIES[number % len(SERIES)], label=policy, lw=1.8)
        ax.set(title=title, xlabel="tokens of one sequence", ylabel="MB")
        ax.set_ylim(bottom=0)
        ax.legend(frameon=False, fontsize=8)
    return figure
