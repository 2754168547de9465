"""`python -m bitnet_ref.cli`: the same as `bitnet-ref`."""

from . import main

main()
