"""Anyone's trace file (see README.md beside this) against the NumPy reference.

    python crossval/trace_file.py MODEL FILE [--html FILE] [--receipt FILE] [--json]

The same as `bitnet-ref crossval trace`. Exit code 0: it agrees, 1: it differs, 3: the file is no trace.
"""

import sys

from bitnet_ref.cli import main

if __name__ == "__main__":
    main(["crossval", "trace", *sys.argv[1:]])
