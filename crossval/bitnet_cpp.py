"""A built bitnet.cpp, or any program with llama-cli's options, against the NumPy reference: greedy tokens.

    python crossval/bitnet_cpp.py MODEL BINARY [--prompt TEXT] [--max-tokens N] [--prints text|ids] [--json]

The same as `bitnet-ref crossval bitnet-cpp`. Exit code 0: the same tokens, 1: they part, 4: there is no such program.
"""

import sys

from bitnet_ref.cli import main

if __name__ == "__main__":
    main(["crossval", "bitnet-cpp", *sys.argv[1:]])
