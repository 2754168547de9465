"""Where the time goes while a model computes, as a tree by the model's text.

timed.py    computes passes with their operations or blocks timed   tree.py   times added up by place in the model
report.py   the tree as a table, a figure and a trace               profile.py  `Profile`, which `Model.profile` returns
"""

from .profile import Profile
from .tree import OpTime, Phase

__all__ = ["OpTime", "Phase", "Profile"]
