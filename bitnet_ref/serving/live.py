"""A view of a running engine that updates itself: in JupyterLab, or in a terminal with rich."""

from __future__ import annotations

import html
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import BackendUnavailable
from .records import RequestProgress

if TYPE_CHECKING:
    from rich.table import Table

MINUTE_S = 60.0
MAX_ROWS = 16  # requests shown; the others are only counted
LATENCIES = {"time_to_first_token_seconds": "first token", "inter_token_latency_seconds": "between tokens"}
QUANTILES = ("p50", "p95", "p99")
HEAD = ("request", "state", "prompt", "new", "seconds", "newest text")


@dataclass(frozen=True)
class Frame:
    """The numbers of one moment. `requests`: the running ones first. `latencies`: p50, p95 and p99 in seconds, None
    while there are none."""

    running: int
    waiting: int
    cache_share: float  # of the cache's pages in use, 0 to 1
    tokens: int  # generated since the engine's start
    tokens_per_s: float  # over the last `seconds`
    seconds: float  # a minute, or since the view began
    speeds: tuple[float, ...]  # tokens per second between two snapshots, oldest first
    latencies: Mapping[str, tuple[float | None, ...]]
    requests: list[RequestProgress]
    ended: bool

    def lines(self) -> list[tuple[str, str]]:
        """(name, value) of everything but the requests."""
        figures = [
            ("requests", f"{self.running} running, {self.waiting} waiting{', engine closed' * self.ended}"),
            ("cache in use", f"{self.cache_share:.0%}"),
            ("tokens", f"{self.tokens:,} in all, {self.tokens_per_s:,.1f} per second in the last {self.seconds:.0f} s"),
        ]
        for name, title in LATENCIES.items():
            values = self.latencies[name]
            words = ["-" if value is None else f"{value * 1e3:.1f} ms" for value in values]
            figures.append((title, ", ".join(f"{q} {word}" for q, word in zip(QUANTILES, words, strict=True))))
        return figures

    def rows(self) -> list[tuple[str, ...]]:
        """The cells of each request that is shown, in the order of HEAD."""
        return [
            (
                *map(
                    str, (each.request_id, each.state, each.prompt_tokens, each.generated_tokens, f"{each.age_s:.1f}")
                ),
                "".join(letter if letter.isprintable() else " " for letter in each.newest_text),
            )
            for each in self.requests[:MAX_ROWS]
        ]

    @property
    def footer(self) -> str:
        """ "and 4 more", or "" when all requests are shown"""
        hidden = len(self.requests) - MAX_ROWS
        return f"and {hidden} more" if hidden > 0 else ""


class History:
    """Turns snapshots of an engine's metrics into frames; remembers a minute of token counts for the speeds."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()  # (time, tokens generated until then)

    def frame(self, now_s: float, snapshot: Mapping[str, Any], requests: list[RequestProgress], ended: bool) -> Frame:
        """now_s: on any monotonic clock. snapshot: of `EngineMetrics`."""
        tokens = snapshot["generation_tokens"]
        self._counts.append((now_s, tokens))
        while self._counts[0][0] < now_s - MINUTE_S:
            self._counts.popleft()
        counts = list(self._counts)
        (first_s, first), (last_s, last) = counts[0], counts[-1]
        return Frame(
            running=snapshot["num_requests_running"],
            waiting=snapshot["num_requests_waiting"],
            cache_share=snapshot["kv_cache_usage_perc"],
            tokens=tokens,
            seconds=last_s - first_s,
            tokens_per_s=(last - first) / (last_s - first_s) if last_s > first_s else 0.0,
            speeds=tuple((b - a) / (t - s) for (s, a), (t, b) in pairwise(counts) if t > s),
            latencies={name: tuple(snapshot[name][q] for q in QUANTILES) for name in LATENCIES},
            requests=sorted(requests, key=lambda each: each.state != "running"),
            ended=ended,
        )


def figures_html(frame: Frame) -> str:
    """The numbers, and the speed of the last minute as a line."""
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in frame.lines())
    return f"<table style='text-align:left;line-height:1.3'>{rows}</table>{draw_speeds(frame.speeds)}"


def requests_html(frame: Frame) -> str:
    head = "".join(f"<th>{name}</th>" for name in HEAD if frame.requests)
    rows = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row in frame.rows()
    )
    table = f"<table style='line-height:1.3;white-space:nowrap'><tr>{head}</tr>{rows}</table>"
    return f"<div style='overflow-x:auto'>{table}</div>{html.escape(frame.footer)}"


def draw_speeds(speeds: Sequence[float]) -> str:
    """Tokens per second as an SVG line, 300 x 50, the maximum at the top."""
    largest = max(speeds, default=0.0) or 1.0
    steps = max(1, len(speeds) - 1)
    points = " ".join(f"{300 * i / steps:.1f},{48 - 44 * speed / largest:.1f}" for i, speed in enumerate(speeds))
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="300" height="50" role="img" aria-label="tokens per second">'
        f'<polyline points="{points}" fill="none" stroke="#3b6fb6" stroke-width="1.5"/></svg>'
        f"<div style='color:#777'>tokens per second, up to {largest:,.0f}</div>"
    )


def as_table(frame: Frame) -> Table:
    from rich.table import Table
    from rich.text import Text

    figures = Table(box=None, show_header=False, pad_edge=False)
    for name, value in frame.lines():
        figures.add_row(Text(name, style="dim"), Text(value))
    requests = Table(*HEAD, box=None, header_style="dim", pad_edge=False)
    for row in frame.rows():
        requests.add_row(*(Text(cell) for cell in row))
    whole = Table.grid()
    whole.add_row(figures)
    whole.add_row(requests)
    if frame.footer:
        whole.add_row(Text(frame.footer, style="dim"))
    return whole


class LiveView(AbstractContextManager["LiveView", None]):
    """Running and waiting requests, the cache, tokens per second, latencies, and the newest text of each request.

    In JupyterLab it is the last line of a cell (`engine.live()`) and needs ipywidgets: a thread takes a snapshot every
    `interval_s` seconds, from when the view is first shown until `close()` or the engine's end. In a terminal it is a
    rich renderable: `with rich.live.Live(engine.live()): ...`.

    look: returns (snapshot of the metrics, requests, whether the engine has ended).
    """

    def __init__(
        self, look: Callable[[], tuple[Mapping[str, Any], list[RequestProgress], bool]], interval_s: float
    ) -> None:
        self.interval_s = interval_s
        self._look, self._history = look, History()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._widget: Any = None
        self.frame = self.look()

    def look(self) -> Frame:
        """Take a snapshot now.   -> the new `frame`"""
        with self._lock:
            self.frame = self._history.frame(time.monotonic(), *self._look())
            return self.frame

    @property
    def widget(self) -> Any:
        """The ipywidgets box with the HTML of figures and requests. The first use makes it and starts its thread.

        Raises BackendUnavailable without ipywidgets."""
        if self._widget is None:
            try:
                import ipywidgets
            except ImportError as problem:
                remedy = "pip install 'bitnet-ref[notebooks]'"
                raise BackendUnavailable(f"the live view needs ipywidgets: {remedy}") from problem
            self._figures, self._requests = ipywidgets.HTML(), ipywidgets.HTML()
            self._button = ipywidgets.Button(description="Stop watching", icon="stop")
            self._button.on_click(lambda _: self._closed.set())
            self._widget = ipywidgets.VBox([self._figures, self._requests, self._button])
            self._show()
            self._thread = threading.Thread(target=self._run, name="bitnet_ref live view", daemon=True)
            self._thread.start()
        return self._widget

    def _show(self) -> None:
        self._figures.value, self._requests.value = figures_html(self.frame), requests_html(self.frame)

    def _run(self) -> None:
        while not self._closed.wait(self.interval_s):
            ended = self.look().ended
            self._show()
            if ended:
                break
        self._button.disabled = True

    def close(self) -> None:
        """Stop updating, and return when the thread has ended. A snapshot taken now stays."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self.look()
            self._show()

    @property
    def watching(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widget, and the snapshot of now as HTML, for a stored notebook or without ipywidgets."""
        bundle: dict[str, Any] = {}
        note = ""
        self.look()
        try:
            widget = self.widget._repr_mimebundle_()
            bundle |= {kind: data for kind, data in widget.items() if kind.startswith("application/")}
        except BackendUnavailable as problem:
            note = f"{problem}<br>"
        still = figures_html(self.frame) + requests_html(self.frame)
        return {**bundle, "text/html": note + still, "text/plain": str(self)}

    def __rich__(self) -> Any:
        return as_table(self.look())

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.frame.lines())

    def __repr__(self) -> str:
        return f"<bitnet_ref.serving.LiveView {self.frame.running} running, {self.frame.waiting} waiting>"
