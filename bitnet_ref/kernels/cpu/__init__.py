"""C headers, one for each instruction set, and the Cython module that calls them."""
