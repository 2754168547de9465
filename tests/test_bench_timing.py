"""benchmark/timing.py and energy.py: means of processor time and energy, counters that wrap, a machine that is busy."""

import os
import time

import pytest

from bitnet_ref.benchmark import timing
from bitnet_ref.benchmark.energy import EnergyMeter
from bitnet_ref.benchmark.timing import Conditions, Sample, Stopwatch, Timing, Watch

RANGE_UJ = 1_000_000


def write_zone(folder, number, name, energy_uj, range_uj=RANGE_UJ):
    zone = folder / f"intel-rapl:{number}"
    zone.mkdir(parents=True)
    (zone / "name").write_text(f"{name}\n")
    (zone / "energy_uj").write_text(f"{energy_uj}\n")
    (zone / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return zone / "energy_uj"


# -- energy ------------------------------------------------------------------------------------------------------------


def test_packages_and_memory_are_counted_once(tmp_path):
    (tmp_path / "intel-rapl").mkdir()  # the folder of the control type, which has no counter
    package = write_zone(tmp_path, "0", "package-0", 100_000)
    other = write_zone(tmp_path, "1", "package-1", 0)
    memory = write_zone(tmp_path, "0:1", "dram", 7)
    cores = write_zone(tmp_path, "0:0", "core", 0)
    everything = write_zone(tmp_path, "2", "psys", 0)
    meter = EnergyMeter(tmp_path)
    before = meter.read_uj()
    package.write_text("350000")
    other.write_text("500000")
    memory.write_text("7")
    cores.write_text("200000")
    everything.write_text("900000")
    assert meter.joules_since(before) == pytest.approx(0.75)
    assert meter.why_not == ""


def test_a_counter_that_starts_again(tmp_path):
    counter = write_zone(tmp_path, "0", "package-0", RANGE_UJ - 200_000)
    meter = EnergyMeter(tmp_path)
    before = meter.read_uj()
    counter.write_text("50000")
    assert meter.joules_since(before) == pytest.approx(0.25)


def test_a_machine_without_counters(tmp_path):
    meter = EnergyMeter(tmp_path / "absent")
    assert "RAPL" in meter.why_not
    assert Stopwatch(meter).lap().energy_j is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_counters_that_only_root_reads(tmp_path):
    write_zone(tmp_path, "0", "package-0", 1).chmod(0)
    assert "chmod" in EnergyMeter(tmp_path).why_not


def test_a_counter_that_is_refused_says_who_can_allow_it(tmp_path, monkeypatch):
    write_zone(tmp_path, "0", "package-0", 1)

    def refuse(zone):
        raise PermissionError(13, "Permission denied", str(zone.counter))

    monkeypatch.setattr("bitnet_ref.benchmark.energy.EnergyZone.read_uj", refuse)
    meter = EnergyMeter(tmp_path)
    assert "chmod a+r" in meter.why_not
    assert meter.zones == []


def test_a_file_that_is_no_counter(tmp_path):
    write_zone(tmp_path, "0", "package-0", "no number")
    meter = EnergyMeter(tmp_path)
    assert meter.why_not
    assert meter.read_uj() == []


def test_energy_of_each_call(tmp_path):
    counter = write_zone(tmp_path, "0", "package-0", 0)
    stopwatch = Stopwatch(EnergyMeter(tmp_path))
    taken = stopwatch.repeat(lambda: counter.write_text("800000"), calls=4)
    assert taken.energy_j == pytest.approx(0.2)
    _, taken = stopwatch.time(counter.write_text, "900000")
    assert taken.energy_j == pytest.approx(0.1)


# -- time --------------------------------------------------------------------------------------------------------------


def test_a_timing_has_the_best_the_median_and_means():
    found = Timing.of([Sample(1.0, 2.0, 10.0), Sample(4.0, 2.5, 20.0), Sample(3.0, 3.0, 60.0)])
    assert found == Timing(1.0, 3.0, 3, 2.5, 30.0)
    assert Timing.of([Sample(1.0, 2.0), Sample(2.0)]) == Timing(1.0, 1.5, 2)


def test_sleep_takes_no_processor_time():
    _, slept = Stopwatch().time(time.sleep, 0.05)
    result, computed = Stopwatch().time(sum, range(1_000_000))
    assert slept.wall_s >= 0.05
    assert slept.processor_s < 0.04
    assert result == 499_999_500_000
    assert computed.processor_s > 0


# -- the machine -------------------------------------------------------------------------------------------------------


def conditions(**changes):
    return Conditions(**{"wall_s": 10.0, "processor_s": 9.9, "processors": 2, "others": 0.0, "waited": 0.0,
                         "why_no_energy": ""} | changes)  # fmt: skip


def test_a_quiet_machine():
    assert conditions().quiet
    assert conditions(waited=None, others=0.1).quiet
    assert not conditions(others=0.3).quiet
    assert not conditions(waited=0.4).quiet


def test_others_are_what_the_machine_did_without_this_process(tmp_path, monkeypatch):
    """4 s in which the processors were busy for 7 s, 1 of them taken by the host; this process had 3 of the 7."""
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")

    def write(user, steal):
        numbers = [user, 0, 0, 500, 60, 0, 0, steal, 0, 0]
        stat.write_text("cpu  " + " ".join(str(number * ticks) for number in numbers) + "\ncpu0 1 2\n")

    write(10, 1)
    watch = Watch(stat)
    write(16, 2)
    monkeypatch.setattr(Stopwatch, "lap", lambda self: Sample(4.0, 3.0))
    found = watch.conditions()
    assert found.others == pytest.approx(1.0)
    assert found.waited == pytest.approx(0.25)
    assert watch.conditions(computing=False).waited is None
    assert found.to_dict()["quiet"] is False


def test_without_proc_stat_others_are_the_load_average(tmp_path, monkeypatch):
    monkeypatch.setattr(timing.os, "getloadavg", lambda: (1.5, 0.0, 0.0))
    assert Watch(tmp_path / "absent").conditions().others == 1.5
