"""Compiled kernels. `.h` files own the lanes, `.pyx` and `.pxi` threads and checks, `.py` callers the meaning."""
