"""Mutations of bytes, of JSON and of safetensors files. `dice` decides everything, so a seed is a file."""

from __future__ import annotations

import json
import random
from typing import Any

HOSTILE: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e-320, 1e300, -1e300),
    *(float("nan"), float("inf"), float("-inf"), True, False, None, "", "0", "x" * 5000, "../x", "\0", "\ud800"),
    *([], [[]], [[[[1]]]], {}, {"": {}}, {"a": [1, {"b": None}]}, [None] * 100, "relu2", "yarn", "bitlinear", "BF16"),
    *(
        {"rope_type": "yarn", "factor": 1e300},
        {"rope_type": "dynamic", "factor": 2},
        {"type": "linear", "factor": 1e-300},
    ),
]


def flip_bytes(dice: random.Random, data: bytes, within: int | None = None) -> bytes:
    out = bytearray(data)
    for _ in range(dice.choice([1, 1, 2, 4, 16])):
        if out:
            out[dice.randrange(min(len(out), within or len(out)))] = dice.randrange(256)
    return bytes(out)


def truncate(dice: random.Random, data: bytes) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


def insert_bytes(dice: random.Random, data: bytes) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.randbytes(dice.choice([1, 4, 100])) + data[at:]


def cut_out(dice: random.Random, data: bytes) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + data[at + dice.choice([1, 4, 100]) :]


def poison(dice: random.Random, data: bytes, start: int) -> bytes:
    """A NaN (quiet or signalling), an infinity or a subnormal number of some float type, at an even place."""
    bits = dice.choice(["817f", "81ff", "017c", "0100807f", "0000c07f", "007c", "807f", "0000807f", "01000000", "0100"])
    value = bytes.fromhex(bits)
    at = start + 2 * dice.randrange(max(1, (len(data) - start - len(value)) // 2))
    return data[:at] + value + data[at + len(value) :]


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value inside a JSON value."""
    out: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        out.append((value, key))
        out.extend(places(inner))
    return out


def change_json(dice: random.Random, value: Any) -> None:
    """Replace, delete, rename or nudge one value, in place."""
    found = places(value)
    if not found:
        return
    container, key = dice.choice(found)
    action = dice.randrange(5)
    if action == 0 and isinstance(container, dict):
        del container[key]
    elif action == 1 and isinstance(container, dict):
        container[dice.choice([*container, "x", "", "__metadata__", "\ud800"])] = container.pop(key)
    elif action == 2 and isinstance(container[key], int | float) and abs(container[key]) < 2**64:
        container[key] += dice.choice([-1, 1, 8, -8, 2**32, 0.5])
    else:
        container[key] = json.loads(json.dumps(dice.choice(HOSTILE)))


def dump(dice: random.Random, value: Any) -> bytes:
    """As JSON text, now and then with a key twice."""
    text = json.dumps(value).encode()
    if dice.randrange(12) == 0 and isinstance(value, dict) and value:
        key = dice.choice(list(value))
        text = text[:-1] + b", " + json.dumps({key: dice.choice(HOSTILE)}).encode()[1:]
    if dice.randrange(40) == 0:
        text = text[:-1] + b', "deep": ' + b"[" * 100_000
    return text


def mutate_json(dice: random.Random, data: bytes) -> bytes:
    try:
        value = None if dice.randrange(3) == 0 else json.loads(data)
    except ValueError:  # it was mutated before
        value = None
    if value is None:
        return dice.choice([flip_bytes, truncate, insert_bytes, cut_out])(dice, data)
    for _ in range(dice.choice([1, 1, 1, 2, 5])):
        change_json(dice, value)
    return dump(dice, value)


def mutate_safetensors(dice: random.Random, data: bytes) -> bytes:
    action = dice.randrange(9)
    length = int.from_bytes(data[:8], "little")
    if action == 0:  # anywhere, so mostly in the weights
        return flip_bytes(dice, data)
    if action == 8:
        return poison(dice, data, start=8 + length)
    if action == 1:
        return flip_bytes(dice, data, within=8 + length)
    if action == 2:
        return dice.choice([truncate, insert_bytes, cut_out])(dice, data)
    if action == 3:
        wrong = dice.choice([0, 1, length - 1, length + 1, len(data), 2**31, 2**63, 2**64 - 1, dice.randrange(2**64)])
        return wrong.to_bytes(8, "little") + data[8:]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    if action == 4:  # two tensors exchange names
        a, b = dice.sample(names, 2)
        header[a], header[b] = header[b], header[a]
    elif action == 5:  # a tensor goes, its bytes stay or go
        begin, end = header.pop(dice.choice(names))["data_offsets"]
        if dice.randrange(2):
            body = body[:begin] + body[end:]
            for entry in header.values():
                if isinstance(entry, dict) and entry.get("data_offsets", [0])[0] >= end:
                    entry["data_offsets"] = [offset - (end - begin) for offset in entry["data_offsets"]]
    else:
        for _ in range(dice.choice([1, 1, 2])):
            change_json(dice, header)
    text = dump(dice, header)
    return len(text).to_bytes(8, "little") + text + body
