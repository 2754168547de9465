"""BitNet b1.58 and LLaMA in plain NumPy: the numerical truth. Read config, quantization, layers, weights, cache, ops,
model. Other families and dialects of weights are in `families/`. May import `errors` and nothing else of the package.
"""
