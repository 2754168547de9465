"""GGUF of llama.cpp and bitnet.cpp: container, block types, I2_S, TL1, TL2, TQ1_0, TQ2_0. Read and written."""
