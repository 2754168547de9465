"""The CUDA device: a GPU through CuPy, or with `BITNET_REF_CUDA=emulated` the host in its place."""

from __future__ import annotations

import os

from ...errors import BackendUnavailable
from .device import Device

VARIABLE = "BITNET_REF_CUDA"


def emulation_wanted() -> bool:
    """Whether BITNET_REF_CUDA asks for the emulation: "emulated" does, "" and "gpu" do not."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "gpu", "emulated"):
        raise BackendUnavailable(f"{VARIABLE}={value!r}: expected gpu, the default, or emulated")
    return value == "emulated"


def why_unavailable(index: int = 0) -> str | None:
    """None when `open_device` gives a device, else the reason and the remedy."""
    if emulation_wanted():
        from .emulation import build as emulated_build

        return emulated_build.why_unavailable()
    from . import cupy_device

    return cupy_device.why_unavailable(index)


def device_count() -> int:
    """The number of GPUs that `open_device` can open. The emulation counts as one."""
    if why_unavailable() is not None:
        return 0
    if emulation_wanted():
        return 1
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def open_device(index: int = 0, memory_limit: int | None = None) -> Device:
    """The GPU of that number, or the emulation. memory_limit: max bytes of all arrays.

    Raises BackendUnavailable with the reason when there is none.
    """
    if emulation_wanted():
        from .emulation.device import EmulatedDevice

        return EmulatedDevice(memory_limit, late=os.environ.get("CUDA_LAUNCH_BLOCKING", "") != "1")
    from .cupy_device import CupyDevice

    return CupyDevice(index, memory_limit)
