"""A figure with sliders (ipywidgets, `pip install 'bitnet-ref[notebooks]'`): moving one draws the figure again."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .figures import Figure, as_png


class Slider(NamedTuple):
    """One number. With `step` 1 it is a whole number."""

    name: str
    value: float
    low: float
    high: float
    step: float


class Explorer:
    """Shows `draw(**values)` beside a slider for each value. In a notebook it is the last line of a cell.

    Without a running kernel (a stored notebook, a web page) or without ipywidgets, it is the figure drawn last.
    `widget` is the ipywidgets box, None without the package; `values` are the current ones.
    """

    def __init__(self, draw: Callable[..., Figure], sliders: Sequence[Slider]) -> None:
        self.draw = draw
        self.values: dict[str, float] = {slider.name: slider.value for slider in sliders}
        self.png = self._draw_png()
        self.problem = ""  # why the current values could not be drawn
        self.widget = self._build(sliders)

    def set(self, **values: float) -> None:
        """Move sliders and draw again. If the values cannot be drawn, `problem` says why, and the figure stays."""
        self.values |= values
        try:
            self.png, self.problem = self._draw_png(), ""
        except Exception as error:  # nothing catches what a slider's callback raises
            self.problem = f"{type(error).__name__}: {error}"

    def _draw_png(self) -> bytes:
        png, self.about = as_png(self.draw(**self.values))
        return png

    def _build(self, sliders: Sequence[Slider]) -> Any:
        try:
            import ipywidgets
        except ImportError:
            return None
        natural = {"width": "auto", "height": "auto", "max_width": "100%", "align_self": "flex-start"}  # not stretched
        image = ipywidgets.Image(value=self.png, format="png", layout=natural)
        note = ipywidgets.Label(value="")

        def move(name: str, change: dict[str, Any]) -> None:
            self.set(**{name: change["new"]})
            image.value, note.value = self.png, self.problem

        controls = []
        for slider in sliders:
            kind = ipywidgets.IntSlider if slider.step == 1 else ipywidgets.FloatSlider
            limits = {"value": slider.value, "min": slider.low, "max": slider.high, "step": slider.step}
            # not while it moves, because drawing takes 0.1 s
            shown = {"description": slider.name, "style": {"description_width": "initial"}, "continuous_update": False}
            control = kind(**limits, **shown)
            control.observe(lambda change, name=slider.name: move(name, change), names="value")
            controls.append(control)
        return ipywidgets.VBox([*controls, note, image])

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle: dict[str, Any] = {"image/png": base64.b64encode(self.png).decode(), "text/plain": repr(self)}
        if self.widget is not None:
            widget = self.widget._repr_mimebundle_()
            bundle |= {kind: data for kind, data in widget.items() if kind.startswith("application/")}
        return bundle, {"image/png": self.about}

    def __repr__(self) -> str:
        return f"<bitnet_ref.notebook.Explorer {', '.join(f'{name} {v:g}' for name, v in self.values.items())}>"
