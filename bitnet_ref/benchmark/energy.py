"""Energy of the processor packages and their memory, from the counters that Linux lists in /sys/class/powercap (RAPL).

A zone is a folder `intel-rapl:0` (a package) or `intel-rapl:0:1` (a part of it), on AMD's processors too:

    name                  "package-0", "dram", "core", "uncore" or "psys"
    energy_uj             microjoules since some moment; readable by root alone on most systems
    max_energy_range_uj   the counter goes on from 0 after this value

The counters are the machine's: what other programs compute is in them, and so is idle power.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
READING = "root can allow it: chmod a+r /sys/class/powercap/intel-rapl*/energy_uj"


@dataclass(frozen=True)
class EnergyZone:
    """One counter."""

    counter: Path
    range_uj: int

    def read_uj(self) -> int:
        return int(self.counter.read_text())


class EnergyMeter:
    """Reads the zones of all packages, and of memory, which is not a part of a package's count."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        self.why_not = ""  # why there is nothing to read
        self.zones: list[EnergyZone] = []
        try:
            self.zones = list(find_zones(folder))
            self.read_uj()
        except (OSError, ValueError) as problem:
            self.zones = []
            self.why_not = f"{problem}; {READING}" if isinstance(problem, PermissionError) else str(problem)
        if not self.zones and not self.why_not:
            self.why_not = f"no counters of energy (RAPL) in {folder}"

    def read_uj(self) -> list[int]:
        """Microjoules of each zone, since no particular moment."""
        return [zone.read_uj() for zone in self.zones]

    def joules_since(self, before_uj: list[int]) -> float | None:
        """Of all zones together, since that reading; a counter may have begun again at 0 once. None without zones."""
        if not self.zones:
            return None
        pairs = zip(self.zones, before_uj, strict=True)
        return sum((zone.read_uj() - before) % zone.range_uj for zone, before in pairs) / 1e6


def find_zones(folder: Path) -> Iterator[EnergyZone]:
    """The packages and memory. Not "core" and "uncore", which are in a package, nor "psys", which has all of it."""
    for zone in sorted(folder.glob("intel-rapl:*")):
        name = (zone / "name").read_text().strip()
        if name.startswith("package") or name == "dram":
            yield EnergyZone(zone / "energy_uj", int((zone / "max_energy_range_uj").read_text()))
