"""`python -m bitnet_ref.cli`: the same as `bitnet-ref`."""

from .start import QuietStart

with QuietStart():
    from . import main

    main()
