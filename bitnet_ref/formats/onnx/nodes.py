"""Collects the nodes and initialisers of an ONNX graph, with names like those of torch's exporter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .library import DATA_TYPES, import_onnx

# (name, array, whether it must be inside) -> TensorProto, with the array in it or in a file beside
AddTensor = Callable[[str, NDArray, bool], Any]


class GraphBuilder:
    """The nodes and initialisers of a graph. Calling it adds a node and returns the name of its output."""

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
