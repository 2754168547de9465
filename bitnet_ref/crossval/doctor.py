"""What this machine and installation can do (`Installation`), and whether the backends agree here (`DoctorReport`)."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict, dataclass
from typing import Any

from .. import __version__
from ..backends import available_backends
from ..backends.cpu import extension
from ..errors import BackendError
from ..formats.open import shipped_models
from ..system.machine import blas_name, cpu_features, cpu_model, operating_system, package_version, total_bytes
from ..system.memory import available_bytes
from ..system.threads import available_cpus, thread_choice
from .paths import sum_up
from .self_check import BackendCheck

REQUIRED = ("numpy", "ml_dtypes", "sentencepiece", "tokenizers", "jinja2", "click", "rich", "threadpoolctl")
OPTIONAL = ("cupy", "jupyterlab", "matplotlib")


@dataclass(frozen=True)
class BackendState:
    """A backend and what computes in it, or why it cannot run here and what to do about it."""

    name: str
    available: bool
    reason: str | None  # None when available
    kernel: str | None  # what computes the ternary product


@dataclass(frozen=True)
class Installation:
    """What is here, without computing anything."""

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
    extension: dict[str, Any]  # built, openmp, why
    backends: list[BackendState]
    methods: list[dict[str, Any]]  # of the compiled kernels; see `extension.Method`
    models: list[str]


@dataclass(frozen=True)
class DoctorReport:
    """All that `bitnet-ref doctor` shows."""

    installation: Installation
    checks: list[BackendCheck]

    @property
    def healthy(self) -> bool:
        """Whether every check passed."""
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """One line."""
        return sum_up((check.backend, row) for check in self.checks for row in check.paths)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        checks = [check.to_dict() for check in self.checks]
        return {**asdict(self.installation), "checks": checks, "healthy": self.healthy, "verdict": self.verdict}


def describe_installation() -> Installation:
    """Examine the machine and the installation."""
    try:
        threads, threads_from = thread_choice()
    except BackendError as error:
        threads, threads_from = None, str(error)
    without = extension.why_unavailable()
    openmp = None if without is not None else bool(extension._cpu.has_openmp)
    return Installation(
        versions={"bitnet_ref": __version__, **{name: package_version(name) for name in REQUIRED + OPTIONAL}},
        blas=blas_name(),
        os=operating_system(),
        python=f"{platform.python_version()} ({platform.python_implementation()}, {sys.executable})",
        cpu=cpu_model(),
        cpu_features=cpu_features(),
        cores=available_cpus(),
        threads=threads,
        threads_from=threads_from,
        memory_total=total_bytes(),
        memory_available=available_bytes(),
        extension={"built": without is None, "openmp": openmp, "why": without},
        backends=[_describe_backend(name, reason) for name, reason in available_backends().items()],
        methods=_describe_methods(),
        models=shipped_models(),
    )


def _describe_methods() -> list[dict[str, Any]]:
    """The methods of the ternary product; [] where no compiled kernel can run or BITNET_REF_SIMD names none."""
    try:
        return [method.to_dict() for method in extension.describe_methods()]
    except BackendError:
        return []


def _describe_backend(name: str, reason: str | None) -> BackendState:
    describe = {"cython": _describe_cpu_kernels, "cupy": _describe_cards}.get(name)
    kernel = None
    if reason is None:
        kernel = "float32 matrix product in BLAS, exact for these integers" if describe is None else describe()
    return BackendState(name, reason is None, reason, kernel)


def _describe_cpu_kernels() -> str:
    """The kernel set that the compiled backend uses, and what this processor lacks for the others."""
    from ..backends.cpu.weights import MIN_SCREENED_BYTES, MIN_STRIPS_BYTES

    try:
        chosen, chosen_strips = extension.choose_simd(), extension.choose_strips(None)
    except BackendError as error:  # BITNET_REF_SIMD asks for a set that cannot run
        return str(error)
    others = [f"{name}: {lacks}" for name, lacks in extension.simd_variants().items() if lacks is not None]
    facts = [f"{chosen} kernels", f"output heads of {MIN_SCREENED_BYTES >> 20} MiB or more: screened"]
    if chosen_strips != "never":
        size = f" of {MIN_STRIPS_BYTES >> 20} MiB or more" if chosen_strips == "auto" else ""
        copies = f"MLP matrices{size} after ReLU²: a second copy, so that zero inputs can be skipped"
        facts.append(f"{copies} (switch off: BITNET_REF_STRIPS=never)")
    facts.append("dense linears among ternary ones: NumPy")  # `CythonBackend.dense_matmul`
    return "; ".join(facts) + (f". Not here: {', '.join(others)}" if others else "")


def _describe_cards() -> str:
    """The cards, or the emulated one, and what an installation without cuBLAS lacks."""
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
