"""What float16 and bfloat16 cost on a backend, in the logits of a text against the NumPy reference.

    python crossval/precision.py [MODEL] [--backend NAME] [--dtype NAME] [--prompt TEXT] [--json]

The same as `bitnet-ref crossval precision`. Exit code 0: measured, 4: the backend cannot run here.
"""

import sys

from bitnet_ref.cli import main

if __name__ == "__main__":
    main(["crossval", "precision", *sys.argv[1:]])
