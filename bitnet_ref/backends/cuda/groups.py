"""Host side of `kernels/cuda/group.cu`: matrices that are ternary by groups, packed on the device.

No GPU has measured it. A prompt takes the same kernel as one token; dense tensor core products may be faster there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...families.groups import GroupTernaryLinear, GroupTernaryWeight
from .dense import KINDS
from .device import DeviceArray
from .workspace import Workspace

FILE = "group.cu"
WORD_COLUMNS, WARPS, TOKENS = 16, 4, 8  # group.cu's columns of a word; warps of a block; tokens of `group_8`


@dataclass(frozen=True, eq=False, repr=False)
class DeviceGroups(GroupTernaryWeight):
    """The matrix as it was read, in the host's memory, and on the device."""

    words: DeviceArray = field(kw_only=True)  # (N, ceil(K/16)) uint32 on the device
    device_scales: DeviceArray = field(kw_only=True)  # (N, groups) on the device
    scales_kind: str = field(kw_only=True)  # float32, float16 or bfloat16

    plain = GroupTernaryLinear.plain  # what was read, without the device's arrays


def takes_groups(w: GroupTernaryLinear) -> bool:
    """Whether the kernels compute from it: inputs as they are, and no word of 16 columns in two groups."""
    return w.rotation is None and (w.group % WORD_COLUMNS == 0 or w.group >= w.in_features)


def put_groups(ws: Workspace, w: GroupTernaryWeight) -> DeviceGroups:
    """The weight on the device."""
    n, columns = w.packed.shape
    packed = np.full((n, -(-columns // 4) * 4), 0x55, dtype=np.uint8)  # code 1: a zero weight
    packed[:, :columns] = w.packed
    kind = w.dtype.name if w.dtype.name in KINDS else "float32"
    scales = ws.upload(w.scales.astype(KINDS[kind], copy=False))
    return DeviceGroups(**vars(w), words=ws.upload(packed.view("<u4")), device_scales=scales, scales_kind=kind)


def group_matmul(ws: Workspace, x: DeviceArray, w: DeviceGroups) -> DeviceArray:
    """x (N, K) float32 on the device -> (N, out), without the bias."""
    n, (out, width) = len(x), w.shape
    y = ws.empty((n, out), np.float32)
    each = 1 if n == 1 else TOKENS
    arguments = x, n, width, w.words, w.device_scales, w.group, out, y
    ws.launch(FILE, f"group_{each}_{w.scales_kind}", (-(-out // WARPS), -(-n // each)), 32 * WARPS, *arguments)
    return y


def take_group_rows(ws: Workspace, w: DeviceGroups, ids: DeviceArray) -> DeviceArray:
    """Rows of the matrix as float32.   ids (N,) -> (N, K)"""
    rows, width = w.shape
    y = ws.empty((len(ids), width), np.float32)
    arguments = w.words, w.device_scales, np.int64(rows), ids, width, w.group, y, ws.trouble
    ws.launch(FILE, f"group_rows_{w.scales_kind}", (len(ids),), 128, *arguments)
    return y
