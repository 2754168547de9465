"""A view of a running engine that updates itself: in JupyterLab, or in a terminal with rich."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import BackendUnavailable
from .frame import Frame, History, as_table, figures_html, requests_html

INTERVAL_S = 0.5


class LiveView:
    """Running and waiting requests, the cache, tokens per second, latencies, and the newest text of each request.

    In JupyterLab it is the last line of a cell (`engine.live()`) and needs ipywidgets: a thread takes a snapshot every
    `interval_s` seconds, from when the view is first shown until `close()` or the engine's end. In a terminal it is a
    rich renderable: `with rich.live.Live(engine.live()): ...`.

    look: returns (snapshot of the metrics, requests, whether the engine has ended).
    """

    def __init__(
        self,
        look: Callable[[], tuple[Mapping[str, Any], Sequence[Any], bool]],
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
        """Take a snapshot now.   -> the new `frame`"""
        with self._lock:
            self.frame = self._history.frame(time.monotonic(), *self._look())
            return self.frame

    # -- JupyterLab ----------------------------------------------------------------------------------------------------

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
        """Stop updating, and return when the thread has ended. The last snapshot stays."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def watching(self) -> bool:
        """Whether its thread is running."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- display -------------------------------------------------------------------------------------------------------

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widget, and the snapshot of now as HTML, for a stored notebook or without ipywidgets."""
        bundle: dict[str, Any] = {}
        self.look()
        try:
            widget = self.widget._repr_mimebundle_()
            bundle |= {kind: data for kind, data in widget.items() if kind.startswith("application/")}
        except BackendUnavailable as problem:
            bundle["text/html"] = f"{problem}<br>"
        still = figures_html(self.frame) + requests_html(self.frame)
        return {**bundle, "text/html": bundle.get("text/html", "") + still, "text/plain": str(self)}

    def __rich__(self) -> Any:
        return as_table(self.look())

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.frame.lines())

    def __repr__(self) -> str:
        return f"<bitnet_ref.notebook.widgets.LiveView {self.frame.running} running, {self.frame.waiting} waiting>"
