"""What moves in a notebook (ipywidgets, `pip install 'bitnet-ref[notebooks]'`): sliders, and the view of an engine.

Each takes functions that return plain data or a figure.
"""

from .explorer import Explorer, Slider
from .live import LiveView

__all__ = ["Explorer", "LiveView", "Slider"]
