"""Hugging Face transformers, float32 and bfloat16, with eager attention, against the NumPy reference.

    python crossval/transformers.py [MODEL] [--python PATH] [--html FILE] [--receipt FILE] [--require] [--json]

The same as `bitnet-ref crossval transformers`. --python names an interpreter that has torch and transformers, if this
one has not. Exit code 0: it agrees, 1: it differs or is missing with --require, 4: it is missing.
"""

import sys

del sys.path[0]  # this folder: its files are not the packages of the same names

from bitnet_ref.cli import main  # noqa: E402

if __name__ == "__main__":
    main(["crossval", "transformers", *sys.argv[1:]])
