"""What this machine and this installation can do, and whether the backends agree here: `examine()` -> `Diagnosis`.

The self-check computes. It runs the shipped model on every backend that is available and holds each to the numerical
contract: int32 accumulators equal to the exact product (taken with int64 arithmetic, so NumPy's BLAS is checked too),
and logits no further from a float64 run than twice the float32 reference is.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..api import Model, load
from ..backends import available_backends
from ..errors import BackendError
from ..formats.open import shipped_models
from ..reference.weights import TernaryWeight
from ..system.threads import available_cpus, thread_choice
from .tolerances import LOGITS_FLOOR

__all__ = ["BackendCheck", "BackendState", "Diagnosis", "examine", "self_check"]

REQUIRED = (
    "numpy",
    "ml_dtypes",
    "safetensors",
    "sentencepiece",
    "tokenizers",
    "jinja2",
    "click",
    "rich",
    "threadpoolctl",
)
OPTIONAL = ("cupy", "jupyterlab", "matplotlib")
_OTHER_DISTRIBUTIONS = {"cupy": ("cupy-cuda12x", "cupy-cuda13x")}
CHECK_PROMPT = "Once upon a time, the little"
CPU_FEATURES = {
    "x86": ("sse2", "avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "amx_int8"),
    "arm": ("neon", "dotprod", "i8mm", "sve"),
}
_NAMES_ELSEWHERE = {"asimd": "neon", "asimddp": "dotprod", "avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni"}


@dataclass(frozen=True)
class BackendState:
    """A backend: what computes in it, or why it cannot run here and what to do about it."""

    name: str
    available: bool
    reason: str | None  # None when available
    kernel: str | None  # what computes the ternary product


@dataclass(frozen=True)
class BackendCheck:
    """One backend's run of the shipped model against the contract."""

    backend: str
    passed: bool
    matrices: int  # ternary products compared
    accumulators: int  # int32 values compared
    unequal: int  # of them, different from the exact product
    logits_error: float | None  # largest distance from the float64 run
    logits_allowed: float | None  # twice the float32 NumPy reference's, plus a floor
    error: str | None = None  # the backend failed outright


@dataclass
class Diagnosis:
    """All that `bitnet-ref doctor` shows."""

    versions: dict[str, str | None]  # None: not installed
    blas: str
    os: str
    python: str
    cpu: str
    cpu_features: dict[str, bool]
    cores: int
    threads: int | None  # None when the environment asks for an impossible number
    threads_from: str
    memory_total: int | None
    memory_available: int | None
    extension: dict[str, Any]  # built, openmp
    backends: list[BackendState] = field(default_factory=list)
    methods: list[dict[str, Any]] = field(default_factory=list)  # of the compiled kernels: kernel_manager.Method
    models: list[str] = field(default_factory=list)
    checks: list[BackendCheck] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether every check passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {**asdict(self), "healthy": self.healthy}


def examine() -> Diagnosis:
    """Look at the machine and the installation, and run the self-check on every available backend."""
    try:
        threads, threads_from = thread_choice()
    except BackendError as error:
        threads, threads_from = None, str(error)
    total, available = _memory()
    return Diagnosis(
        versions={"bitnet_ref": __version__, **{name: _version(name) for name in REQUIRED + OPTIONAL}},
        blas=_blas(),
        os=_operating_system(),
        python=f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        cpu=_cpu_model(),
        cpu_features=_cpu_features(),
        cores=available_cpus(),
        threads=threads,
        threads_from=threads_from,
        memory_total=total,
        memory_available=available,
        extension=_extension(),
        backends=[_backend_state(name, reason) for name, reason in available_backends().items()],
        methods=_methods(),
        models=shipped_models(),
        checks=self_check(),
    )


# -- the self-check ----------------------------------------------------------------------------------------------------


def self_check(model: str = "storyteller") -> list[BackendCheck]:
    """Every available backend on a few tokens of a shipped model."""
    try:
        threads = thread_choice()[0]
    except BackendError:  # reported elsewhere; the arithmetic can be checked all the same
        threads = 1
    exact = load(model, backend="numpy", dtype="float64", threads=threads)
    tokens = exact.tokenizer.encode(CHECK_PROMPT)
    truth = exact.logits(tokens)
    reference = load(model, backend="numpy", threads=threads).logits(tokens)
    allowed = 2 * float(np.abs(reference - truth).max()) + LOGITS_FLOOR
    names = [name for name, reason in available_backends().items() if reason is None]
    return [check_backend(name, exact, tokens, truth, allowed, threads) for name in names]


def check_backend(
    name: str, exact: Model, tokens: list[int], truth: NDArray, allowed: float, threads: int | None = None
) -> BackendCheck:
    """One backend on the model that `exact` is, a NumPy one: its accumulators against the exact product of its own
    int8 inputs, its logits against `truth`."""
    try:
        subject = load(exact.path or "storyteller", backend=name, threads=threads)
        logits = subject.logits(tokens)
        matrices, accumulators, unequal = _compare_accumulators(subject, exact, tokens)
    except Exception as error:  # an old extension beside new Python files, a broken driver: that is what doctor is for
        return BackendCheck(name, False, 0, 0, 0, None, allowed, f"{type(error).__name__}: {error}")
    distance = float(np.abs(logits - truth).max())
    passed = accumulators > 0 and unequal == 0 and distance <= allowed
    return BackendCheck(name, passed, matrices, accumulators, unequal, distance, allowed)


def _compare_accumulators(subject: Model, plain: Model, tokens: list[int]) -> tuple[int, int, int]:
    """(matrices, accumulators, how many of them are not the exact integer). The matrices are the plain backend's: the
    subject may keep them in a layout of its own."""
    _, seen = subject.run_with_cache(tokens, ["*.hook_x_int8", "*.hook_acc_int32"])
    matrices = accumulators = unequal = 0
    for name, weight in plain.weights.linears():
        if not isinstance(weight, TernaryWeight):
            continue
        acc = seen[f"{name}.hook_acc_int32"]
        exact = seen[f"{name}.hook_x_int8"].astype(np.int64) @ weight.ternary().T.astype(np.int64)
        matrices += 1
        accumulators += acc.size
        unequal += int((acc != exact).sum())
    return matrices, accumulators, unequal


# -- the installation --------------------------------------------------------------------------------------------------


def _version(package: str) -> str | None:
    """The installed version, found without importing the package."""
    if find_spec(package) is None:
        return None
    for distribution in (package, *_OTHER_DISTRIBUTIONS.get(package, ())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return "installed"


def _blas() -> str:
    """The BLAS that NumPy was built with."""
    try:
        found = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"{found['name']} {found['version']}"
    except (KeyError, TypeError):
        return "unknown"


def _extension() -> dict[str, Any]:
    try:
        from ..kernels.cpu import _cpu  # type: ignore[attr-defined]
    except ImportError as error:
        return {"built": False, "openmp": None, "why": str(error)}
    return {"built": True, "openmp": bool(_cpu.has_openmp)}


def _backend_state(name: str, reason: str | None) -> BackendState:
    kernel = None
    if reason is None and name == "numpy":
        kernel = "float32 matrix product in BLAS, exact for these integers"
    elif reason is None and name == "cython":
        kernel = _compiled_kernel()
    elif reason is None and name == "cupy":
        kernel = _cuda_kernel()
    return BackendState(name, reason is None, reason, kernel)


def _compiled_kernel() -> str:
    """The set of kernels that the compiled backend takes, and what this processor lacks for the others."""
    from ..backends.cpu import backend as cython_backend

    try:
        chosen = cython_backend.choose_simd()
    except BackendError as error:  # BITNET_REF_SIMD asks for another
        return str(error)
    others = [f"{name}: {lacks}" for name, lacks in cython_backend.simd_variants().items() if lacks is not None]
    from ..backends.screened_head import SMALLEST_SCREENED_BYTES

    head = f"; heads from {SMALLEST_SCREENED_BYTES >> 20} MiB on are screened"
    return f"{chosen} kernels{head}" + (f" (not here: {', '.join(others)})" if others else "")


def _cuda_kernel() -> str:
    """The cards, or that there is an emulated one; and what an installation without cuBLAS lacks."""
    from ..backends import cuda
    from ..backends.cuda.device import INSTALL

    cards, has_cublas = [], True
    for index in range(max(1, cuda.device_count())):
        try:
            device = cuda.open_device(index)
        except BackendError as error:
            if index == 0:
                return str(error)
            cards.append(f"not card {index} ({error})")
            continue
        if device.emulated:
            return "CUDA kernels, emulated on the processor (BITNET_REF_CUDA=emulated): slow, for checking only"
        has_cublas &= device.can_matmul_16
        (major, minor), memory = device.compute_capability, device.memory().total / 2**30
        cards.append(f"{device.name} (card {index}, compute capability {major}.{minor}, {memory:.0f} GiB)")
    if len(cards) > 1:
        cards.append("which share a model's layers with load(..., devices=[0, 1])")
    lacks = f"; cuBLAS is not installed, and prompts in 16 bits take a slower kernel: {INSTALL}"
    return f"CUDA kernels on {', '.join(cards)}" + ("" if has_cublas else lacks)


def _methods() -> list[dict[str, Any]]:
    """The ways to multiply by a ternary matrix; [] where there are no compiled kernels, or the environment asks for one
    that cannot run, which the backend's own line tells."""
    from ..backends.cpu import kernel_manager

    try:
        return [method.to_dict() for method in kernel_manager.methods()]
    except BackendError:
        return []


# -- the machine -------------------------------------------------------------------------------------------------------


def _operating_system() -> str:
    name = platform.system()
    if name == "Linux":
        with contextlib.suppress(OSError):
            name = platform.freedesktop_os_release().get("PRETTY_NAME", name)
    elif name == "Darwin":
        name = f"macOS {platform.mac_ver()[0]}"
    return f"{name}, kernel {platform.release()}, {platform.machine()}"


def _cpu_info() -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _sysctl(name: str) -> str:
    """A macOS system value, or "" anywhere else."""
    if sys.platform != "darwin":
        return ""
    done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu_model() -> str:
    info = _cpu_info()
    return info.get("model name") or _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _cpu_features() -> dict[str, bool]:
    """The instruction sets that matter to the kernels: present or not."""
    info = _cpu_info()
    arm = platform.machine().lower() in ("arm64", "aarch64")
    if sys.platform == "darwin":
        if arm:
            known = {"dotprod": "FEAT_DotProd", "i8mm": "FEAT_I8MM"}
            flags = {"neon"} | {name for name, key in known.items() if _sysctl(f"hw.optional.arm.{key}") == "1"}
        else:
            listed = f"{_sysctl('machdep.cpu.features')} {_sysctl('machdep.cpu.leaf7_features')}"
            flags = set(listed.lower().split())
    else:
        flags = set((info.get("flags") or info.get("Features") or "").split())
    flags |= {_NAMES_ELSEWHERE[name] for name in flags & set(_NAMES_ELSEWHERE)}
    return {name: name in flags for name in CPU_FEATURES["arm" if arm else "x86"]}


def _memory() -> tuple[int | None, int | None]:
    """(bytes in all, bytes available now), cut to the cgroup's limit; None where the system does not say."""
    total = available = None
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        text = Path("/proc/meminfo").read_text()
        available = next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        pass
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total = limit if total is None else min(total, limit)
        available = limit - used if available is None else min(available, limit - used)
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        pass
    return total, available
