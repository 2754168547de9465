"""Every backend of this package, the compiled one with each instruction set, against the NumPy reference.

    python crossval/backends.py [MODEL] [--prompt TEXT] [--html FILE] [--receipt FILE] [--require] [--json]

The same as `bitnet-ref crossval backends`. Exit code 0: all agree, 1: one differs or is missing with --require.
"""

import sys

from bitnet_ref.cli import main

if __name__ == "__main__":
    main(["crossval", "backends", *sys.argv[1:]])
