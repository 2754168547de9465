"""Where the time goes while a model computes: every operation of its backend timed, as a tree by the model's text.

timed.py    a copy of a backend whose operations are timed      report.py  the tree as a table and as HTML
tree.py     the calls of a step added up, by place in the model  export.py  the calls as a Chrome trace
profile.py  `Profile`: what `Model.profile` gives
"""

from .profile import Profile
from .timed import TimedBackend, timed
from .tree import OpTime, Phase

__all__ = ["OpTime", "Phase", "Profile", "TimedBackend", "timed"]
