"""The `onnx` package: its dtypes, the names in our own exports, and a builder of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...errors import BackendUnavailable

FORMAT_KEY, CONFIG_KEY = "bitnet_ref.format", "bitnet_ref.config"  # metadata_props of our exports
FORMAT_VERSION = "1"
MODEL_FILE = "model.onnx"  # in a folder of its own
MAX_MODEL_BYTES = 2**31 - 1  # protobuf's limit per message
PACKED_SUFFIX, SCALE_SUFFIX = ".weight_packed", ".weight_scale"  # of a ternary linear's two initialisers

# TensorProto.DataType -> NumPy's dtype, of the types that take whole bytes
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.uint8),
    3: np.dtype(np.int8),
    4: np.dtype(np.uint16),
    5: np.dtype(np.int16),
    6: np.dtype(np.int32),
    7: np.dtype(np.int64),
    9: np.dtype(np.bool_),
    10: np.dtype(np.float16),
    11: np.dtype(np.float64),
    12: np.dtype(np.uint32),
    13: np.dtype(np.uint64),
    16: np.dtype(ml_dtypes.bfloat16),
}
DATA_TYPES = {dtype: number for number, dtype in DTYPES.items()}
# (name, array, whether it must be inside) -> TensorProto, with the array in it or in a file beside
AddTensor = Callable[[str, NDArray, bool], Any]


def import_onnx() -> Any:
    """The `onnx` module. Raises BackendUnavailable with the command that installs it."""
    try:
        import onnx
    except ImportError as problem:
        raise BackendUnavailable(".onnx files need the onnx package: pip install 'bitnet-ref[onnx]'") from problem
    return onnx


class GraphBuilder:
    """The nodes and initialisers of a graph, with names like those of torch's exporter. Calling it adds a node."""

    def __init__(self, add_tensor: AddTensor) -> None:
        self._onnx = import_onnx()
        self._add_tensor = add_tensor
        self._scope, self._counts, self._constants = "", dict[str, int](), dict[tuple[Any, ...], str]()
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def __call__(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """Add a node. Returns the name of its output, or a list of names."""
        base = f"{self._scope}/{op_type}"
        count = self._counts[base] = self._counts.get(base, -1) + 1
        name = f"{base}_{count}" if count else base
        names = [f"{name}_output_{i}" for i in range(outputs)]
        self.nodes.append(self._onnx.helper.make_node(op_type, inputs, names, name=name, **attributes))
        return names[0] if outputs == 1 else names

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Nodes added inside are named below `name`."""
        outer, self._scope = self._scope, f"{self._scope}/{name}"
        yield
        self._scope = outer

    def weight(self, name: str, array: NDArray) -> str:
        """An initialiser of that name."""
        self.initializers.append(self._add_tensor(name, array, False))
        return name

    def constant(self, value: Any, dtype: type) -> str:
        """A small initialiser; equal values share one."""
        array: NDArray = np.asarray(value, dtype=dtype)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            self.initializers.append(self._add_tensor(self._constants[key], array, True))  # shapes are inferred from it
        return self._constants[key]

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def cast(self, x: str, dtype: type) -> str:
        return self("Cast", x, to=DATA_TYPES[np.dtype(dtype)])
