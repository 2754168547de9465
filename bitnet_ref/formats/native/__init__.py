"""The native file, `NAME.bitnet.safetensors`: a whole model in one file, with a hash of it. Read and written."""
