"""ONNX graphs of a model: read by their shape, and written. Needs the `onnx` extra."""
