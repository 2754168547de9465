"""A view of a running engine that keeps itself up to date: in JupyterLab, or in a terminal by rich."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import BackendUnavailable
from .frame import Frame, History, RequestState, as_table, figures_html, requests_html

INTERVAL_S = 0.5


class LiveView:
    """Running and waiting requests, the cache, tokens a second, latencies, and the newest text of each request.

    In JupyterLab it is the last line of a cell (`engine.live()`), and needs ipywidgets: a thread of its own looks at
    the engine every `interval_s` seconds, from when the view is first shown until `close()` or the engine's end. In a
    terminal it is a renderable of rich's: `with rich.live.Live(engine.live()): ...`.

    look: gives (snapshot of the metrics, requests, whether the engine has ended).
    """

    def __init__(
        self,
        look: Callable[[], tuple[Mapping[str, Any], Sequence[RequestState], bool]],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.interval_s = interval_s
        self._look, self._history = look, History()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._widget: Any = None
        self.frame = self.look()

    def look(self) -> Frame:
        """Look now. -> the new `frame`"""
        with self._lock:
            self.frame = self._history.frame(time.monotonic(), *self._look())
            return self.frame

    # -- JupyterLab ----------------------------------------------------------------------------------------------------

    @property
    def widget(self) -> Any:
        """The ipywidgets box, whose children `figures` and `requests` hold HTML. Made, and its thread started, when it
        is first asked for. Raises BackendUnavailable without ipywidgets."""
        if self._widget is None:
            try:
                import ipywidgets
            except ImportError as problem:
                words = "the live view needs ipywidgets: pip install 'bitnet-ref[notebooks]'"
                raise BackendUnavailable(words) from problem
            self._figures, self._requests = ipywidgets.HTML(), ipywidgets.HTML()
            self._button = ipywidgets.Button(description="Stop watching", icon="stop")
            self._button.on_click(lambda _: self._stop())
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

    def _stop(self) -> None:
        self._closed.set()

    def close(self) -> None:
        """Stop looking, and return when the thread is gone. What was seen last stays."""
        self._stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def watching(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what it shows -------------------------------------------------------------------------------------------------

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widget; for a stored notebook, or without ipywidgets, what there was to see when it was shown."""
        bundle: dict[str, Any] = {}
        self.look()
        try:
            found = self.widget._repr_mimebundle_()
            bundle |= {kind: data for kind, data in found.items() if kind.startswith("application/")}
        except BackendUnavailable as problem:
            bundle["text/html"] = f"{problem}<br>"
        still = figures_html(self.frame) + requests_html(self.frame)
        return {**bundle, "text/html": bundle.get("text/html", "") + still, "text/plain": str(self)}

    def __rich__(self) -> Any:
        return as_table(self.look())

    def __str__(self) -> str:
        return "\n".join(f"{what}: {how_much}" for what, how_much in self.frame.lines())

    def __repr__(self) -> str:
        return f"<bitnet_ref.notebook.widgets.LiveView {self.frame.running} running, {self.frame.waiting} waiting>"
