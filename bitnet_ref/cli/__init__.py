"""The shell interface, `bitnet-ref`: one module per command. `main` is the entry point. May import every room.

Exit codes: 0 fine, 1 a comparison differs, 2 wrong usage, 3 a file that is bad or cannot be written, 4 a backend (or
program) is not available, 70 a bug in bitnet_ref itself, 130 interrupted.
"""

from __future__ import annotations

from .start import QuietStart

with QuietStart():
    from .program import COMMANDS as COMMANDS
    from .program import cli as cli
    from .program import main as main
