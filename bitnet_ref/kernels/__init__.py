"""Compiled kernels. `.h` files own the lanes, `.pyx` the threads and the checks, `.py` callers the meaning."""
