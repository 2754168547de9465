"""The CUDA kernels on the processor, compiled by the host C++ compiler: to read, test and debug them without a card."""
