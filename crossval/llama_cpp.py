"""llama.cpp, through llama-cpp-python, on GGUF files that are written for it, against the NumPy reference.

    python crossval/llama_cpp.py [MODEL] [--python PATH] [--html FILE] [--receipt FILE] [--require] [--json]

The same as `bitnet-ref crossval llama-cpp`. --python names an interpreter that has llama-cpp-python, if this
one has not. Exit code 0: it agrees, 1: it differs or is missing with --require, 4: it is missing.
"""

import sys

del sys.path[0]  # this folder: its files are not the packages of the same names

from bitnet_ref.cli import main  # noqa: E402

if __name__ == "__main__":
    main(["crossval", "llama-cpp", *sys.argv[1:]])
