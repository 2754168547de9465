"""What a checkpoint is, read without holding it: `inspect_model(path)` -> `Inspection`, plain data.

`show_tensor(path, name)` shows one tensor. Any format that `load` reads is taken.

It is not a validator of its own: configuration, tensors and tokenizer go through the same readers as `load`, one layer
at a time, and what they refuse becomes an *error* finding while the rest is still reported. A *warning* is something
that loads but is probably not what was meant; a *note* is worth knowing.
"""

import os

from ..formats.checkpoint import LoadOptions, Progress
from ..formats.open import choose_format, describe_ignored, find_model
from .facts import Finding, Inspection, SizeOfKind, StoredTensor, TernaryMatrix, TokenizerFacts, shape_in_words
from .gguf import GgufInspector
from .hf import HfInspector, NativeInspector
from .inspector import Inspector
from .onnx import OnnxInspector
from .tensor import TensorView, show_tensor

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

_INSPECTORS: dict[str, type[Inspector]] = {
    "hf": HfInspector,
    "native": NativeInspector,
    "gguf": GgufInspector,
    "onnx": OnnxInspector,
}


def inspect_model(
    path: str | os.PathLike[str], progress: Progress | None = None, options: LoadOptions | None = None
) -> Inspection:
    """Inspect a model in any format that `load` reads: a folder, a file, or a shipped model by its name.

    progress: called with (layers done, layers in all). options: what the user knows and the file does not say.
    Raises FormatError when there is no such file or its format is not read, and BackendUnavailable when the library
    that reads it is missing; everything else that is wrong becomes a finding. One layer is in memory at a time (of an
    .onnx file without external data, the whole file).
    """
    given = find_model(path)
    name, model_path = choose_format(given)
    inspector = _INSPECTORS[name](model_path, options, progress)
    if words := describe_ignored(given, model_path):
        inspector.out.report("note", "weights", words)
    return inspector.run()
