"""What this machine and this Python installation are: operating system, processor, memory, installed packages."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from .memory import cgroup_files

CPU_FEATURES = {
    "x86": ("sse2", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "amx_int8"),
    "arm": ("neon", "dotprod", "i8mm", "sve"),
}
_SYNONYMS = {"asimd": "neon", "asimddp": "dotprod", "avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni"}
_DISTRIBUTIONS = {"cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x")}


def package_version(package: str) -> str | None:
    """The installed version, found without importing the package; None when it is not installed."""
    if find_spec(package) is None:
        return None
    for distribution in _DISTRIBUTIONS.get(package, (package,)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return "installed"


def blas_name() -> str:
    """The BLAS that NumPy was built with."""
    try:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"{blas['name']} {blas['version']}"
    except (KeyError, TypeError):
        return "unknown"


def operating_system() -> str:
    """Name, kernel and architecture."""
    name = platform.system()
    if name == "Linux":
        with contextlib.suppress(OSError):
            name = platform.freedesktop_os_release().get("PRETTY_NAME", name)
    elif name == "Darwin":
        name = f"macOS {platform.mac_ver()[0]}"
    return f"{name}, kernel {platform.release()}, {platform.machine()}"


def cpu_model() -> str:
    info = _cpu_info()
    return info.get("model name") or _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def cpu_features() -> dict[str, bool]:
    """Which of the instruction sets that have kernels the processor has."""
    info = _cpu_info()
    is_arm = platform.machine().lower() in ("arm64", "aarch64")
    if sys.platform != "darwin":
        flags = set((info.get("flags") or info.get("Features") or "").split())
    elif is_arm:
        keys = {"dotprod": "FEAT_DotProd", "i8mm": "FEAT_I8MM"}
        flags = {"neon"} | {name for name, key in keys.items() if _sysctl(f"hw.optional.arm.{key}") == "1"}
    else:
        listed = f"{_sysctl('machdep.cpu.features')} {_sysctl('machdep.cpu.leaf7_features')}"
        flags = set(listed.lower().split())
    flags |= {_SYNONYMS[name] for name in flags & set(_SYNONYMS)}
    return {name: name in flags for name in CPU_FEATURES["arm" if is_arm else "x86"]}


def total_bytes() -> int | None:
    """The machine's memory, or less where its cgroup has a limit. None where the system does not say."""
    sizes = []
    with contextlib.suppress(OSError, ValueError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, _ in cgroup_files():
        with contextlib.suppress(OSError, ValueError):  # no such cgroup, or no limit ("max")
            sizes.append(int(limit.read_text()))
    return min(sizes, default=None)


def _cpu_info() -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _sysctl(name: str) -> str:
    """A macOS system value; "" on other systems."""
    if sys.platform != "darwin":
        return ""
    return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()
