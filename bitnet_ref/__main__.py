"""`python -m bitnet_ref`: the same as `bitnet-ref`."""

from .cli import main

main()
