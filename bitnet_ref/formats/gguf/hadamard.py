"""The keys `prism.hadamard.*`: which matrices of a GGUF are ternary in a rotated basis, and which basis (Bonsai 2).

Read plainly, such planes load and write nonsense. So a key or a value that is not understood is an error, and so is a
file in which only some of the ternary planes are named; a file without keys gets a sentence in the evidence.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import ConfigError
from ...families.groups import Rotation
from .blocks import GROUP_TYPES
from .file import GgufFile, Typed

PREFIX = "prism.hadamard."
_FIXED = {"version": 1, "transform": "normalized-sylvester-walsh-hadamard", "axis": "input-last-dimension"}
_GROUPED = "gdn_v_grouped"
_KEYS = (
    *(*_FIXED, "block_size", "sign_mode", "sign_widths", "sign_values", "weight_names", "inverse_weight_names"),
    _GROUPED,
)
_TABLE = "token_embd.weight"
_GROUPED_OUT = ".ssm_out.weight"


def read_rotations(file: GgufFile, evidence: list[str], folded: bool = False) -> dict[str, Rotation]:
    """Name of a rotated tensor -> its basis. Raises ConfigError.   folded: what the evidence says becomes of them"""
    stored = {key.removeprefix(PREFIX): value for key, value in file.metadata.items() if key.startswith(PREFIX)}
    keys = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in stored.items()}
    planes = [name for name, tensor in file.tensors.items() if tensor.type.name in GROUP_TYPES]
    if not keys:
        if any(file.tensors[name].type.name.startswith("P") for name in planes):
            words = (
                f"PQ2_0 and PTQ1_0 planes without keys {PREFIX}*: taken as not rotated; if they are, this is nonsense"
            )
            evidence.append(words)
            warnings.warn(f"{file.path}: {words}", stacklevel=4)
        return {}

    def fail(key: str, message: str) -> ConfigError:
        return ConfigError(message, path=file.path, field=PREFIX + key)

    def names(key: str) -> list[str]:
        value = keys.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) and name in file.tensors for name in value):
            raise fail(key, "expected names of tensors of this file")
        return value

    for key in keys:
        if key not in _KEYS:
            raise fail(key, f"is not known; known are {', '.join(_KEYS)}")
    for key, expected in _FIXED.items():
        if keys.get(key) != expected:
            raise fail(key, f"expected {expected!r}, got {keys.get(key)!r}")
    block = keys.get("block_size")
    if not isinstance(block, int) or isinstance(block, bool) or block < 1 or block & (block - 1):
        raise fail("block_size", f"expected a power of two, got {block!r}")
    signs = _signs(keys, fail)
    rotated, inverse = names("weight_names"), names("inverse_weight_names")
    if any(name != _TABLE for name in inverse):
        raise fail("inverse_weight_names", f"expected {_TABLE} alone, got {inverse}")
    if missing := [name for name in planes if name not in rotated and name not in inverse]:
        raise fail("weight_names", f"names some ternary planes and not {missing[0]}: a rotation of half a model")
    rotations: dict[str, Rotation] = {}
    by_width: dict[int, Rotation] = {}  # linears with the same basis share one object: kernels turn their input once
    for name in dict.fromkeys((*rotated, *inverse)):
        width = file.tensors[name].shape[-1]
        if width % block or (signs is not None and width not in signs):
            raise fail("block_size", f"{name} has {width} inputs, no multiple of {block}, or without signs")
        vector = np.ones(width, dtype=np.float32) if signs is None else signs[width]
        rotations[name] = by_width.setdefault(width, Rotation(vector, block))
    if has_grouped_heads(file):
        for name in (name for name in file.tensors if name.endswith(_GROUPED_OUT) and name not in rotations):
            raise fail(_GROUPED, f"is true, and {name}, whose inputs it orders, is not among the rotated matrices")
    way = "folded into dense ones" if folded else "run as stored, on turned inputs"
    evidence.append(f"Hadamard basis, blocks of {block}: {len(rotations)} matrices are {way}")
    return rotations


def has_grouped_heads(file: GgufFile) -> bool:
    """Whether the inputs of `ssm_out` are in the order of Hugging Face: the value heads of a key head together.

    All other tensors of a Qwen3.5 have the first value head of each key head, then the second of each, and so on.
    """
    value = file.metadata.get(PREFIX + _GROUPED, False)
    if not isinstance(value, bool):
        raise ConfigError(f"expected true or false, got {value!r}", path=file.path, field=PREFIX + _GROUPED)
    return value


def rotation_metadata(rotations: Mapping[str, Rotation], grouped_heads: bool = False) -> dict[str, Typed]:
    """The keys of a file with rotated matrices.   rotations: name of a tensor -> its basis

    grouped_heads: see `has_grouped_heads`.
    Raises ConfigError for bases that these keys cannot say.
    """
    signs: dict[int, Any] = {}
    blocks = {rotation.block for rotation in rotations.values()}
    for name, rotation in rotations.items():
        if not np.array_equal(signs.setdefault(rotation.signs.size, rotation.signs), rotation.signs):
            raise ConfigError(f"GGUF has one vector of signs for all matrices of a width, and {name} has another")
    if len(blocks) > 1:
        raise ConfigError(f"GGUF has one size of Hadamard blocks, and the matrices have {sorted(blocks)}")
    values = {
        **{key: Typed("uint32" if isinstance(value, int) else "string", value) for key, value in _FIXED.items()},
        "block_size": Typed("uint32", blocks.pop()),
        "sign_mode": Typed("string", "explicit"),
        "sign_widths": Typed("[int32]", np.array(list(signs), dtype=np.int32)),
        "sign_values": Typed("[float32]", np.concatenate(list(signs.values()))),
        "weight_names": Typed("[string]", [name for name in rotations if name != _TABLE]),
        "inverse_weight_names": Typed("[string]", [name for name in rotations if name == _TABLE]),
    }
    if grouped_heads:
        values[_GROUPED] = Typed("bool", True)
    return {PREFIX + key: value for key, value in values.items()}


def _signs(keys: dict[str, Any], fail: Any) -> dict[int, Any] | None:
    """Width -> its vector of signs; None: no signs."""
    mode = keys.get("sign_mode")
    if mode == "identity":
        return None
    if mode != "explicit":
        raise fail("sign_mode", f"expected identity or explicit, got {mode!r}")
    widths: Any = keys.get("sign_widths")
    values = keys.get("sign_values")
    whole = isinstance(widths, list) and all(isinstance(w, int) and not isinstance(w, bool) and w > 0 for w in widths)
    if not whole or len(set(widths)) != len(widths):
        raise fail("sign_widths", f"expected different numbers of inputs, got {widths!r}"[:200])
    if not isinstance(values, list) or len(values) != sum(widths) or not {*values} <= {-1.0, 1.0}:
        raise fail("sign_values", f"expected {sum(widths)} values of -1 or 1")
    ends = np.cumsum(widths)
    vector = np.array(values, dtype=np.float32)
    return {width: vector[end - width : end] for width, end in zip(widths, ends, strict=True)}
