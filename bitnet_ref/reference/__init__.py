"""BitNet b1.58 and LLaMA in plain NumPy: the numerical truth. Read config, quantization, layers, weights,
cache, ops, model. What other families and dialects of weights add is in `families/`.

May import `errors` and nothing else of the package."""
