"""Memory that is left in a service or a container: limits of cgroups."""

import pytest

from bitnet_ref.system import machine, memory

MIB = 1 << 20


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["/app.slice/serve.service", "/app.slice", "/"])
def test_the_smallest_limit_around_the_process_counts(tmp_path, monkeypatch, version, limited):
    root = tmp_path / "memory" if version == 1 else tmp_path
    names = ("limit_in_bytes", "usage_in_bytes", "total_") if version == 1 else ("max", "current", "")
    for place in ("/", "/app.slice", "/app.slice/serve.service"):
        folder = root / place.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        no_limit = str(2**63 - 4096) if version == 1 else "max"
        (folder / f"memory.{names[0]}").write_text(f"{300 * MIB if place == limited else no_limit}\n")
        (folder / f"memory.{names[1]}").write_text(f"{290 * MIB}\n")
        stat = f"anon {50 * MIB}\n{names[2]}active_file {40 * MIB}\n{names[2]}inactive_file {200 * MIB}\n"
        (folder / "memory.stat").write_text(stat)
    line = "4:cpu,memory:" if version == 1 else "0::"
    (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{line}/app.slice/serve.service\n")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "cgroup")
    assert memory.available_bytes() == 250 * MIB
    assert machine.total_bytes() == 300 * MIB
    (tmp_path / "cgroup").write_text(f"{line}/a/path/of/the/host\n")  # as in a container
    assert (machine.total_bytes() == 300 * MIB) == (limited == "/")
