"""Trace files: the named tensors of one run, as safetensors with a few strings of metadata.

`crossval/README.md` specifies the format. The names are those of `names.py`; any tensor may be left out. The metadata:

    format        "bitnet_ref.trace"                version       "1"
    token_ids     "[1, 17, 5]", the tokens of the run, BOS included if the engine saw it
    engine        the program that computed it      engine_dtype  "float32", "float64", "bfloat16" or "float16"
    calls         "[16, 1, 1]", how many tokens each call of the engine computed; of several sequences a list for each
    sequences     "[10, 8]", how many tokens each sequence has, where the run has several, laid end to end
    prompt, config_hash, weight_hash                each optional, as are calls and sequences

A run is written while it is computed and read one tensor, or a few rows, at a time: no process holds a whole trace.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.loaded import LoadedModel
from ..backends.observe import observe
from ..backends.record import NamesFilter, Recorder, check_matched
from ..backends.run import run
from ..errors import FormatError, printable
from ..formats.hashes import config_hash, weight_hash
from ..formats.safetensors import DTYPES, SafetensorsFile
from ..reference.cache import TokenBatch
from ..reference.layers import Array
from ..system.atomic import atomic_path
from .calls import SequenceRun, calls_metadata, read_calls
from .names import INT8, op_order
from .types import StrPath, Tensors, Tokens

FORMAT, VERSION = "bitnet_ref.trace", 1
ENGINE_DTYPES = ("float32", "bfloat16", "float16")
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ENTRY_BYTES = 300  # reserved in the header for each tensor, besides its name
_COPY_BYTES = 1 << 20
_ENGINE_LENGTH = 100  # characters that are shown of an engine's name
_REMEDY = "crossval/README.md shows the metadata of a trace, with examples in Python and C"


class TraceWriter:
    """Writes tensors as they come, and at the end the header, into space reserved before them.

    names: of all tensors that may come.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str], names: Collection[str]) -> None:
        self.metadata = dict(metadata)
        self.entries: dict[str, dict[str, Any]] = {}
        reserved = 64 + len(json.dumps([self.metadata, *names])) + _ENTRY_BYTES * len(names)
        self._header_bytes = reserved + -(8 + reserved) % 64
        self._path, self._end = path, 0
        self._file = open(path, "wb", buffering=_COPY_BYTES)  # noqa: SIM115 - closed by close()
        self._file.seek(8 + self._header_bytes)

    def add(self, name: str, array: Array) -> None:
        """Append one tensor."""
        if name in self.entries:
            raise FormatError("this name was written before", path=self._path, field=name)
        array = storable(name, array, self._path)
        end = self._end + array.nbytes
        entry = {"dtype": _DTYPE_NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [self._end, end]}
        self._file.write(array.reshape(-1).view(np.uint8).data)
        self.entries[name], self._end = entry, end

    def close(self) -> None:
        """Write the header, which makes the file a trace."""
        header = json.dumps({"__metadata__": self.metadata, **self.entries}).encode()
        with self._file:
            if len(header) > self._header_bytes:
                raise FormatError("the header has more tensors or axes than space was reserved for", path=self._path)
            self._file.seek(0)
            self._file.write(self._header_bytes.to_bytes(8, "little") + header.ljust(self._header_bytes))


def storable(name: str, array: Array, path: Path) -> Array:
    """The array as a trace holds it: in one piece, float64 as float32. Raises FormatError for other dtypes."""
    array = np.asarray(array)
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    if array.dtype not in _DTYPE_NAMES:
        raise FormatError(f"a trace cannot hold {array.dtype}", path=path, field=name)
    return np.ascontiguousarray(array).reshape(array.shape)


class _FileRecorder(Recorder):
    """A recorder whose tensors go to a file instead of into memory."""

    def __init__(self, model: LoadedModel, names: NamesFilter, writer: TraceWriter) -> None:
        super().__init__(model.backend, model.config, names)
        self.writer = writer

    def keep(self, name: str, array: Array) -> None:
        if self.wants(name) and name not in self.writer.entries:  # a pass with NaN is run again to name the tensor
            self.writer.add(name, self.be.to_host(array))
        self.current = name


def record_to_file(
    model: LoadedModel, tokens: Tokens, path: StrPath, names: NamesFilter = None, prompt: str | None = None
) -> Array:
    """Run the model over the tokens and write the tensors whose names match (None: all) while they are computed.

    -> logits (T, V). The file appears under its name only when it is complete. Float64 tensors are rounded to float32.
    Raises GenerationError for names that match no tensor.
    """
    ids = model.check_tokens(tokens)
    batch = TokenBatch.of([(0, 0, ids)])
    engine = f"bitnet_ref {model.backend.name}"
    metadata = trace_metadata(ids.tolist(), engine=engine, prompt=prompt)
    metadata |= {"config_hash": config_hash(model.config), "weight_hash": weight_hash(model.weights)}
    with atomic_path(path) as temporary:
        writer = TraceWriter(temporary, metadata, op_order(model.config))
        observed = observe(model.backend, _FileRecorder(model, names, writer))
        try:
            logits = run(observed, model.weights, model.config, batch, model.new_cache(1, len(ids))).all()
            check_matched(writer.entries, names)
            return logits
        finally:
            writer.close()


def trace_metadata(
    token_ids: Tokens,
    *,
    engine: str,
    prompt: str | None = None,
    engine_dtype: str = "float32",
    calls: Sequence[Any] | None = None,
    sequences: Tokens | None = None,
) -> dict[str, str]:
    """The metadata of a trace, as strings. calls, sequences: as `read_calls` reads them."""
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "token_ids": json.dumps([int(i) for i in token_ids]),
        "engine": engine,
        "engine_dtype": engine_dtype,
        **calls_metadata(calls, sequences),
    }
    return metadata if prompt is None else {**metadata, "prompt": prompt}


def write_trace(
    path: StrPath,
    tensors: Tensors,
    token_ids: Tokens,
    *,
    engine: str,
    prompt: str | None = None,
    engine_dtype: str = "float32",
    calls: Sequence[Any] | None = None,
    sequences: Tokens | None = None,
) -> None:
    """Write arrays as a trace, for a script around another engine. Raises FormatError for a dtype it cannot hold."""
    from safetensors.numpy import save  # here, so that traces are read where it is not installed: in a browser

    path = Path(path)
    metadata = trace_metadata(
        token_ids, engine=engine, prompt=prompt, engine_dtype=engine_dtype, calls=calls, sequences=sequences
    )
    data = save({name: storable(name, array, path) for name, array in tensors.items()}, metadata)
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


@dataclass(frozen=True)
class TraceTensor:
    """A tensor in a trace file. A slice of its first axis reads those rows."""

    file: SafetensorsFile
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.tensors[self.name].shape

    def __getitem__(self, rows: slice) -> Array:
        start, stop, _ = rows.indices(self.shape[0])
        return self.file.read_rows(self.name, start, stop)


class Trace(SafetensorsFile, Mapping[str, Array]):
    """An open trace file: name -> array. Each access reads the tensor from the file.

    Raises FormatError for a file that is no trace or is truncated.
    """

    def __init__(self, path: StrPath) -> None:
        super().__init__(path)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        if self.metadata.get("format") != FORMAT:
            raise self._bad("format", f'expected "{FORMAT}": this safetensors file is not a trace. {_REMEDY}')
        if self.metadata.get("version") != str(VERSION):
            raise self._bad("version", f'expected "{VERSION}", got {self.metadata.get("version")!r}')
        try:
            ids = json.loads(self.metadata.get("token_ids", ""))
        except (ValueError, RecursionError) as problem:
            raise self._bad("token_ids", f"expected a JSON list of the run's token ids. {_REMEDY}") from problem
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise self._bad("token_ids", "expected a JSON list of the run's token ids, each 0 to 2^31 - 1")
        self.token_ids: list[int] = ids
        self.engine_dtype = self.metadata.get("engine_dtype", "float32")
        if self.engine_dtype == "float64":
            self.engine_dtype = "float32"  # its differences from the reference are the reference's own roundings
        if self.engine_dtype not in ENGINE_DTYPES:
            raise self._bad("engine_dtype", f"expected one of {', '.join(ENGINE_DTYPES)}, got {self.engine_dtype!r}")
        self.engine = printable(self.metadata.get("engine", "unknown engine")[:_ENGINE_LENGTH], keep="")
        self.prompt = self.metadata.get("prompt")
        try:
            self.sequences, self.sequence_calls = read_calls(self.metadata, len(ids))
        except ValueError as problem:
            key, message = problem.args
            raise self._bad(key, f"{message}. {_REMEDY}") from problem
        self.calls = self.sequence_calls[0] if len(self.sequences) == 1 else ()

    def runs(self) -> list[TraceRun]:
        """The run of each sequence: this trace itself, where it has one."""
        if len(self.sequences) == 1:
            return [self]
        return [SequenceRun(self, i) for i in range(len(self.sequences))]

    def _bad(self, field: str, message: str) -> FormatError:
        return self.error(message, 8, f"__metadata__.{field}")

    @property
    def own_engine(self) -> bool:
        """Whether this package computed the run."""
        return self.engine.split()[:1] == ["bitnet_ref"]

    @property
    def carries_inputs(self) -> bool:
        """Whether it has int8 inputs of linears, so that each product can be judged on its own input."""
        return any(name.endswith(INT8) for name in self)

    def tensor(self, name: str) -> TraceTensor:
        return TraceTensor(self, name)

    def __getitem__(self, name: str) -> Array:
        return self.read(name)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


TraceRun = Trace | SequenceRun  # a trace, or one sequence of it
