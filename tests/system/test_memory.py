"""Memory that is left in a service or a container: limits of cgroups."""

from functools import partial

import pytest

from bitnet_ref.system import machine, memory
from bitnet_ref.system.cgroups import cgroup_folders

MIB = 1 << 20


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("limited", ["/app.slice/serve.service", "/app.slice", "/"])
def test_the_smallest_limit_around_the_process_counts(tmp_path, monkeypatch, version, limited):
    top, own = tmp_path / "sys/fs/cgroup", tmp_path / "proc/self/cgroup"
    root = top / "memory" if version == 1 else top
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
    own.parent.mkdir(parents=True)
    own.write_text(f"9:name=systemd:/\n{line}/app.slice/serve.service\n")
    monkeypatch.setattr(memory, "cgroup_folders", partial(cgroup_folders, root=tmp_path))
    assert memory.available_bytes() == 250 * MIB
    assert machine.total_bytes() == 300 * MIB
    own.write_text(f"{line}/a/path/of/the/host\n")  # as in a container
    assert (machine.total_bytes() == 300 * MIB) == (limited == "/")
