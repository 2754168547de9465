"""`CardArray`: a NumPy array that can be used only as a CuPy array can, for tests without a card.

It refuses what CuPy refuses: implicit conversion to NumPy, host arrays among its arguments, and every function, method
and keyword that is not in cupy_api.json. That list was taken from CuPy by `python tests/training/card_array.py`.
Not imitated: CuPy's order of summation.
"""

import importlib
import inspect
import json
from numbers import Number
from pathlib import Path

import numpy as np

API = Path(__file__).with_name("cupy_api.json")
NAMES = json.loads(API.read_text()) if API.is_file() else {}
CREATE = ("arange", "asarray", "zeros", "empty", "full")
FUNCTIONS = (
    *CREATE, "clip", "concatenate", "einsum", "empty_like", "isfinite", "split", "unique", "where", "zeros_like",
    "flatnonzero",
)  # fmt: skip
UFUNCS = (
    "absolute", "add", "bitwise_and", "bitwise_or", "divide", "exp", "greater", "greater_equal", "invert", "isfinite",
    "less_equal", "log", "matmul", "maximum", "multiply", "negative", "power", "right_shift", "rint", "sqrt",
    "square", "subtract", "tanh",
)  # fmt: skip
METHODS = {  # arguments from cupy/_core/core.pyx: compiled methods tell no signature
    "all": ["axis", "out", "keepdims"],
    "astype": ["dtype", "order", "casting", "subok", "copy"],
    "copy": ["order"],
    "max": ["axis", "out", "keepdims"],
    "mean": ["axis", "dtype", "out", "keepdims"],
    "reshape": ["shape"],
    "sum": ["axis", "dtype", "out", "keepdims"],
    "transpose": ["axes"],
    "view": ["dtype", "array_class"],
}


class CardArray(np.lib.mixins.NDArrayOperatorsMixin):
    def __init__(self, host):
        assert type(host) is np.ndarray
        self._host = host

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    T = property(lambda self: CardArray(self._host.T))

    def __len__(self):
        return len(self._host)

    def __array__(self, *_, **__):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __float__(self):
        return float(self._host)

    def __int__(self):
        return int(self._host)

    def __bool__(self):
        return bool(self._host)

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwargs):
        if ufunc.__name__ not in NAMES["ufuncs"] or method != "__call__":
            raise TypeError(f"CuPy has no {ufunc.__name__}.{method}")
        check_names(kwargs, NAMES["ufuncs"][ufunc.__name__], ufunc.__name__)
        out = tuple(to_host(each, "out") for each in out)
        result = ufunc(*(to_host(x, ufunc.__name__) for x in inputs), **kwargs, **({"out": out} if out else {}))
        return to_card(result)

    def __array_function__(self, function, types, args, kwargs):
        name = function.__name__
        if function.__module__ != "numpy" or name not in NAMES["functions"]:
            raise TypeError(f"CuPy has no {function.__module__}.{name}")
        names = NAMES["functions"][name]
        if "kwargs" not in names:
            assert len(args) <= len(names), f"{name}: {len(args)} arguments, CuPy takes {names}"
        check_names(kwargs, names, name)
        if name == "asarray":
            (array,) = args
            return to_card(np.array(array._host if isinstance(array, CardArray) else array, **kwargs))
        return to_card(function(*(to_host(x, name) for x in args), **{k: to_host(v, name) for k, v in kwargs.items()}))

    def __getitem__(self, key):
        return to_card(self._host[to_index(key)])

    def __setitem__(self, key, value):
        self._host[to_index(key)] = to_host(value, "an assignment")

    def get(self):
        return self._host.copy()


def method(name):
    def call(self, *args, **kwargs):
        names = METHODS[name]
        assert len(args) <= len(names) or name in ("reshape", "transpose"), f"{name}: {args}, CuPy takes {names}"
        check_names(kwargs, names, name)
        return to_card(getattr(self._host, name)(*args, **kwargs))

    return call


for _name in METHODS:
    setattr(CardArray, _name, method(_name))


def check_names(kwargs, names, what):
    if wrong := [name for name in kwargs if name not in names and names != ["operands", "kwargs"]]:
        raise TypeError(f"CuPy's {what} takes {names}, not {wrong}")


def to_card(result):
    """CuPy returns arrays of no dimension where NumPy returns scalars."""
    if isinstance(result, list | tuple):
        return type(result)(to_card(each) for each in result)
    return CardArray(result if type(result) is np.ndarray else np.array(result))


def to_host(x, what):
    if isinstance(x, list | tuple):
        return type(x)(to_host(each, what) for each in x)
    if isinstance(x, np.ndarray):
        raise TypeError(f"{what}: Unsupported type numpy.ndarray")
    if isinstance(x, CardArray):
        return x._host
    assert x is None or isinstance(x, Number | str | type | np.dtype | np.generic), (what, x)
    return x


def to_index(key):
    keys = key if isinstance(key, tuple) else (key,)
    for each in keys:
        if not (each is None or each is Ellipsis or isinstance(each, slice | int | CardArray)):
            raise TypeError(f"an index of {type(each).__name__}, which CuPy copies to the card unasked")
    keys = tuple(each._host if isinstance(each, CardArray) else each for each in keys)
    return keys if isinstance(key, tuple) else keys[0]


class CardModule:
    """What the trainer takes of CuPy itself."""

    @staticmethod
    def asarray(array):
        return CardArray(np.array(array))


def from_cupy(cupy):
    """The list, as CuPy has it."""
    functions = {}
    for name in FUNCTIONS:
        function = getattr(cupy, name)
        try:
            functions[name] = list(inspect.signature(function).parameters)
        except ValueError:  # a ufunc
            functions[name] = ["x", "out", "dtype", "casting"]
    assert all(callable(getattr(cupy.ndarray, name)) for name in (*METHODS, "get"))
    ufuncs = {}
    for name in UFUNCS:
        assert type(getattr(cupy, name)).__name__ in ("ufunc", "_GUFunc"), name
        ufuncs[name] = ["out", "dtype", "casting"]
    return {"cupy": cupy.__version__, "functions": functions, "ufuncs": ufuncs}


if __name__ == "__main__":
    API.write_text(json.dumps(from_cupy(importlib.import_module("cupy")), indent=1) + "\n")
