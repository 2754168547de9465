"""The CUDA kernels on the processor, built by the host's C++ compiler: to read, test and debug them without a GPU."""
