"""What a checkpoint is, read without holding it: `inspect_model(path)` -> `Inspection`, plain data.

`show_tensor(path, name)` shows one tensor. Any format that `load` reads is taken.

It is not a validator of its own: configuration, tensors and tokenizer go through the same readers as `load`, one layer
at a time, and what they refuse becomes an *error* finding while the rest is still reported. A *warning* is something
that loads but is probably not what was meant; a *note* is worth knowing.
"""

from .facts import Finding, Inspection, SizeOfKind, StoredTensor, TernaryMatrix, TokenizerFacts, shape_in_words
from .reader import inspect_model
from .tensor import show_tensor
from .tensor_view import TensorView

__all__ = [
    "Finding",
    "Inspection",
    "SizeOfKind",
    "StoredTensor",
    "TensorView",
    "TernaryMatrix",
    "TokenizerFacts",
    "inspect_model",
    "shape_in_words",
    "show_tensor",
]
