"""The native file, `NAME.bitnet.safetensors`: a whole model in one safetensors file, in the layout we compute with.

Tensors carry our own names. The config says whether a linear is ternary, has a bias, or has a norm inside:

    embedding                             (V, D)  BF16, F16 or F32; `lm_head.weight` too unless it is tied
    blocks.0.attn_norm ... final_norm     (D,)    F32
    blocks.0.attn.q_proj.packed           (N, ceil(K/4)) U8, two bits a weight: `quantization.pack_ternary`; or
                        .trits            (N, ceil(K/5)) U8, 1.6 bits a weight: `base3`
                        .w_dequant_scale  ()      F32: W ~ w_t * w_dequant_scale, in every native file
                        .weight           (N, K)  BF16, F16 or F32, of a linear that is dense
                        .scales           (N, ceil(K/group)) BF16, F16 or F32, beside .packed or .trits of a linear or
                        .group            ()      I64: `embedding` that is ternary by groups (from version 2 on)
                        .bias             (N,)    F32        .input_norm  (K,) F32
                        .signs            (K/b, b) F32, of a linear or `embedding` in a Hadamard basis of blocks of b
                        .order            (K,)    I64, of inputs that the basis takes in another order
    blocks.0.*                            F32: arrays of a block that its family has: `Family.array_shapes`
    tokenizer/tokenizer.json ...          (n,)    U8: the tokenizer's files, byte for byte, chat template among them

Metadata: `format` "bitnet_ref", `format_version`, `config` (ModelConfig as JSON; its quantization describes the source
checkpoint, not this file) and `content_hash`, a SHA-256 over everything else.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, FormatError, ShapeError
from ...families import KINDS, config_from_dict, config_to_dict
from ...families.hadamard import read_bases
from ...families.linear_norms import put_norm
from ...reference import quantization
from ...reference.config import ModelConfig
from ...reference.layers import Array
from ...reference.weights import DenseWeight, LinearWeight, TernaryWeight
from ...system.atomic import atomic_path
from ...system.json_file import parse_json_object
from ..checkpoint import (
    MAX_TOKENIZER_BYTES,
    TOKENIZER_FILES,
    Checkpoint,
    LoadOptions,
    Progress,
    all_linears,
    array_shape,
    choose_kind,
    has_bias,
    is_ternary,
    linear_shape,
    norm_size,
    read_matrix,
)
from ..hf.folder import CheckpointTensors
from ..planned_tensors import PlannedTensor, layout_of, plan_model, write_parts
from ..safetensors import DTYPES, SafetensorsWriter, content_hash, dtype_name
from .base3 import TRITS_PER_BYTE, first_invalid_byte, pack_base3, unpack_base3

SUFFIX = ".bitnet.safetensors"
FORMAT, VERSION = "bitnet_ref", 2
TOKENIZER_PREFIX = "tokenizer/"
STORAGES = ("2bit", "base3")
FORMS = [kind.native for kind in KINDS.values() if kind.native is not None]
_NO_HASH = "sha256:" + "0" * 64
_HASH_BLOCK = 1 << 22


class NativeCheckpoint(Checkpoint):
    """An open native file. `evidence` says how its ternary matrices are stored."""

    def __init__(self, path: Path, options: LoadOptions | None = None) -> None:
        self.path, self.kind = path, "native"
        self.tensors = CheckpointTensors(path)
        self.taken = self.tensors.taken
        self.metadata = self.tensors.metadata
        with self.closed_on_error():
            self._check_version()
            self.config = self._read_config()
            names = ("embedding", *all_linears(self.config))
            bases = read_bases(self, {name: linear_shape(self.config, name)[1] for name in names})
            self.set_bases(bases, options or LoadOptions())
            if options is not None and options.verify:
                self.verify()
        base3 = sum(name.endswith(".trits") for name in self.tensors.names)
        planes = base3 + sum(name.endswith(".packed") for name in self.tensors.names)
        self.evidence = [f"{planes} ternary planes, {base3} of them in base 3"]

    def close(self) -> None:
        self.tensors.close()

    def fail(self, tensor: str, message: str) -> FormatError:
        return self.tensors.fail(tensor, message)

    def _bad(self, key: str, message: str) -> FormatError:
        return FormatError(message, path=self.path, offset=8, field=f"__metadata__.{key}")

    def _check_version(self) -> None:
        stored_format = self.metadata.get("format")
        if stored_format != FORMAT:
            message = f"expected {FORMAT!r}, got {stored_format!r}: not a native file, whatever its name; "
            raise self._bad("format", message + "if it belongs to a Hugging Face folder, load the folder")
        text = self.metadata.get("format_version", "")
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and text == str(int(text)) and int(text)):
            raise self._bad("format_version", f"expected a whole number from 1, got {text[:100]!r}")
        if int(text) > VERSION:
            message = f"the file is of version {text}, and this bitnet_ref reads up to version {VERSION}: "
            remedy = "install a newer bitnet_ref, or write the file again with this one"
            raise self._bad("format_version", message + remedy)

    def _read_config(self) -> ModelConfig:
        field = "__metadata__.config"
        if "config" not in self.metadata:
            raise self._bad("config", "is required and absent")
        data = self.metadata["config"].encode("utf-8", "surrogatepass")
        try:
            config = config_from_dict(parse_json_object(data, FormatError, self.path))
        except (ConfigError, FormatError) as error:
            inner = f"{field}.{error.field}" if error.field else field
            raise FormatError(error.message, path=self.path, offset=8, field=inner) from None
        tensors = len(self.tensors.names)
        if config.num_hidden_layers > tensors:  # before anything is counted or named layer by layer
            message = f"says {config.num_hidden_layers} layers, and the file has {tensors} tensors"
            raise self._bad("config.num_hidden_layers", message)
        return config

    def take(self, name: str, shape: tuple[int, ...], *dtypes: str) -> Array:
        """A tensor. FormatError for another shape, or dtype; by default any of floats."""
        return self.tensors.take(name, shape, dtypes or ("BF16", "F16", "F32"))

    def embedding(self) -> LinearWeight:
        return self._float_inputs("embedding", linear_shape(self.config, "embedding"), None)

    def norm(self, name: str) -> NDArray[np.float32]:
        return self.take(name, (norm_size(self.config, name),), "F32")

    def array(self, name: str) -> NDArray[np.float32]:
        return self.take(name, array_shape(self.config, name), "F32")

    def linear(self, name: str) -> LinearWeight:
        cfg = self.config
        n, k = linear_shape(cfg, name)
        bias = self.take(f"{name}.bias", (n,), "F32") if has_bias(cfg, name) else None
        if not is_ternary(cfg, name):
            return self._float_inputs(name, (n, k), bias)
        packed = self.read_plane(name, n, k)
        tensor = f"{name}.w_dequant_scale"
        scale = self.checked_scale(tensor, np.float32(self.take(tensor, (), "F32")))
        eps = self.input_norm_eps
        norm = None if eps is None else self.take(f"{name}.input_norm", (k,), "F32")
        return put_norm(TernaryWeight(packed, k, scale, bias), norm, eps)

    def _float_inputs(self, name: str, shape: tuple[int, int], bias: NDArray[np.float32] | None) -> LinearWeight:
        """A matrix that is no BitLinear: of the kind that its tensors are of, else dense."""
        for form in FORMS:
            if name + form.mark in self.tensors:
                return form.read(self, name, shape, bias)
        return DenseWeight(self.take(_dense_name(name), shape), bias)

    def read_plane(self, name: str, n: int, k: int) -> NDArray[np.uint8]:
        """The ternary matrix (n, k) of a linear or "embedding", packed."""
        if f"{name}.trits" in self.tensors:
            return self._read_trits(name, n, k)
        name += ".packed"
        packed = self.take(name, (n, -(-k // quantization.CODES_PER_BYTE)), "U8")
        self.check_codes(name, packed)
        self._check_padding(name, packed[:, -1] >> np.uint8(2 * (k % 4)), 0x55 >> 2 * (k % 4), k % 4)
        return packed

    def _read_trits(self, name: str, n: int, k: int) -> NDArray[np.uint8]:
        name += ".trits"
        trits = self.take(name, (n, -(-k // TRITS_PER_BYTE)), "U8")
        if (at := first_invalid_byte(trits)) is not None:
            raise self.fail(name, f"holds {trits[at]} in byte {list(at)}; expected five trits, 0 to 242")
        place = 3 ** (k % TRITS_PER_BYTE)
        self._check_padding(name, trits[:, -1] // np.uint8(place), 121 // place, k % TRITS_PER_BYTE)
        return unpack_base3(trits, k)

    def _check_padding(self, name: str, last: NDArray[np.uint8], zeros: int, used: int) -> None:
        """The rest of a row's last byte must hold zero weights, so that a matrix has one form only."""
        if used and (last != zeros).any():
            row = int(np.flatnonzero(last != zeros)[0])
            raise self.fail(name, f"row {row} goes on after its last weight; expected zero weights as padding")

    def dense_dtype(self, name: str) -> np.dtype:
        for tensor in (*(name + form.mark for form in FORMS), _dense_name(name)):
            if tensor in self.tensors:
                return DTYPES[self.tensors.info(tensor).dtype]
        return super().dense_dtype(name)  # which says what is wrong

    def tokenizer_files(self) -> dict[str, bytes]:
        files = {}
        for name in self.tensors.names:
            if not name.startswith(TOKENIZER_PREFIX):
                continue
            short = name.removeprefix(TOKENIZER_PREFIX)
            info = self.tensors.info(name)
            if short not in TOKENIZER_FILES:
                raise self.fail(name, f"expected one of {', '.join(TOKENIZER_FILES)} after {TOKENIZER_PREFIX!r}")
            if len(info.shape) != 1 or info.nbytes > MAX_TOKENIZER_BYTES:
                raise self.fail(name, f"expected at most {MAX_TOKENIZER_BYTES} bytes, got the shape {info.shape}")
            files[short] = self.take(name, info.shape, "U8").tobytes()
        return files

    def finish(self) -> None:
        self.tokenizer_files()  # checked here, so that a damaged one is found by `load`
        unused = [name for name in self.tensors.names if name not in self.taken]
        self.refuse_unused(unused, "the model that the file's config describes")

    @property
    def content_hash(self) -> str:
        """The stored hash: "sha256:" and 64 hexadecimal digits."""
        return self.metadata.get("content_hash", "")

    def verify(self) -> str:
        """Compute the content hash from every byte and return it. FormatError if it differs from the stored one.

        Reads the whole file, at about 0.4 GB/s on a processor without SHA instructions.
        """
        digests = {}
        for name in self.tensors.names:
            info, digest = self.tensors.info(name), hashlib.sha256()
            for block in self.tensors.blocks(name, _HASH_BLOCK):
                digest.update(block)
            digests[name] = (info.dtype, info.shape, digest.hexdigest())
        computed = content_hash(self.metadata, digests)
        if computed != self.content_hash:
            stored = self.content_hash[:100]
            message = f"the file says {stored!r}, its content gives {computed}: it was changed or damaged"
            raise self._bad("content_hash", message)
        return computed


def _dense_name(name: str) -> str:
    return name if name == "embedding" else f"{name}.weight"


def write_native(
    checkpoint: Checkpoint, path: str | os.PathLike[str], storage: str = "2bit", progress: Progress | None = None
) -> str:
    """Write all of a checkpoint (weights, config, tokenizer) to `path`, which must end in .bitnet.safetensors.

    storage: "2bit", or "base3": matrices 20% smaller that take longer to read. The model is the same.
    progress: called with (parts done, parts in total).
    Returns the content hash. The same model gives the same bytes; an interrupt leaves the old file or none.
    """
    if storage not in STORAGES:
        raise ConfigError(f"expected {' or '.join(STORAGES)}, got {storage!r}", field="storage")
    if not os.fspath(path).endswith(SUFFIX):
        raise ConfigError(f"a native file's name ends in {SUFFIX}, got {os.fspath(path)!r}", field="path")
    tokenizer = {TOKENIZER_PREFIX + name: data for name, data in sorted(checkpoint.tokenizer_files().items())}

    def plan_array(name: str) -> PlannedTensor:
        return PlannedTensor(name, "F32", array_shape(checkpoint.config, name), np.asarray)

    plan = plan_model(checkpoint, str, partial(_plan_linear, checkpoint, storage), plan_array)
    plan["embedding"] = _plan_own_kind(checkpoint, storage, "embedding") or plan["embedding"]
    layout = layout_of(plan) | {name: ("U8", (len(data),)) for name, data in tokenizer.items()}
    metadata = {
        "format": FORMAT,
        "format_version": str(VERSION if any(name.endswith(form.mark) for form in FORMS for name in layout) else 1),
        "config": json.dumps(config_to_dict(checkpoint.config), sort_keys=True, separators=(",", ":")),
        "content_hash": _NO_HASH,
    }
    digests = {}

    def change(name: str, part: Any) -> Any:
        if not isinstance(part, LinearWeight):
            return part
        if name != "embedding":
            _check(checkpoint, name, part)
        return part if part.bit_linear is not None else choose_kind(checkpoint, name, part)

    with atomic_path(path) as temporary, SafetensorsWriter(temporary, layout, metadata) as writer:

        def write(name: str, array: Array) -> None:
            writer.write(name, array)
            digest = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            digests[name] = (*layout[name], digest.hexdigest())

        for name, data in tokenizer.items():
            write(name, np.frombuffer(data, dtype=np.uint8))
        write_parts(checkpoint, plan, write, progress, change)
        computed = content_hash(metadata, digests)
        writer.set_metadata("content_hash", computed)
    return computed


def _plan_linear(checkpoint: Checkpoint, storage: str, name: str) -> Iterator[PlannedTensor]:
    config, (n, k) = checkpoint.config, linear_shape(checkpoint.config, name)
    if has_bias(config, name):
        yield PlannedTensor(f"{name}.bias", "F32", (n,), attrgetter("bias"))
    if not is_ternary(config, name):
        dtype = dtype_name(checkpoint.given_dtype(name))
        dense = PlannedTensor(f"{name}.weight", dtype, (n, k), attrgetter("array"))
        yield from _plan_own_kind(checkpoint, storage, name) or [dense]
        return
    yield _plan_plane(storage, name, (n, k), attrgetter("bit_linear.packed"))
    yield PlannedTensor(
        f"{name}.w_dequant_scale", "F32", (), lambda w: np.float32(w.bit_linear.w_dequant_scale).reshape(())
    )
    if checkpoint.input_norm_eps is not None:
        yield PlannedTensor(f"{name}.input_norm", "F32", (k,), attrgetter("norm.weight"))


def _plan_plane(
    storage: str, name: str, shape: tuple[int, int], packed: Callable[[Any], NDArray[np.uint8]]
) -> PlannedTensor:
    n, k = shape
    if storage == "base3":
        return PlannedTensor(f"{name}.trits", "U8", (n, -(-k // TRITS_PER_BYTE)), lambda w: pack_base3(packed(w), k))
    return PlannedTensor(f"{name}.packed", "U8", (n, -(-k // quantization.CODES_PER_BYTE)), packed)


def _plan_own_kind(checkpoint: Checkpoint, storage: str, name: str) -> list[PlannedTensor]:
    """The tensors of a matrix of a kind with a form of its own, which is read to find out; none of another."""
    w: Any = read_matrix(checkpoint, name)
    form = KINDS[w.kind].native
    if form is None:
        return []

    def make(end: str) -> Callable[[Any], Array]:
        return lambda w: form.arrays(w)[end]

    arrays = form.arrays(w).items()
    beside = [PlannedTensor(name + end, dtype_name(a.dtype), a.shape, make(end)) for end, a in arrays]
    return [_plan_plane(storage, name, w.shape, attrgetter("packed")), *beside]


def _check(checkpoint: Checkpoint, name: str, w: LinearWeight) -> None:
    """ShapeError if the weight contradicts the config."""
    config, eps = checkpoint.config, checkpoint.input_norm_eps
    is_bit_linear = w.bit_linear is not None
    agrees = is_bit_linear == is_ternary(config, name)
    if is_bit_linear:
        agrees = agrees and (None if w.norm is None else w.norm.eps) == eps
    if not agrees or (w.bias is not None) != has_bias(config, name):
        raise ShapeError("write_native", expected=f"{name} as the config has it", got=f"another {type(w).__name__}")
