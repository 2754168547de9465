"""BitNet b1.58 in plain NumPy: the numerical truth. Read config, quantization, layers, weights, cache, ops and model.

May import `errors` and nothing else of the package."""
