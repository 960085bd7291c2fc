"""Limits of memory in containers: deepspeed.md 3.5, where the host's total was taken for the container's."""

import resource
import subprocess
import sys

import pytest

from funzero.planning.limits import read_limits

GIB, MIB = 2**30, 2**20
V2 = "30 23 0:26 {mounted} {at} rw shared:9 - cgroup2 cgroup2 rw\n"
V1 = "31 23 0:27 {mounted} {at} rw shared:10 - cgroup cgroup rw,memory\n"
SENTINEL = 9223372036854771712


def machine(root, cgroup="", mounts="", files=None, total=64 * GIB, available=32 * GIB):
    """A fake root: a host, this process's cgroup, mounts, and files below /sys/fs/cgroup."""
    texts = {
        "proc/meminfo": f"MemTotal:  {total // 1024} kB\nMemFree:  1 kB\nMemAvailable:  {available // 1024} kB\n",
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mounts,
    } | {f"sys/fs/cgroup/{k}": str(v) for k, v in (files or {}).items()}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return read_limits(root, of_process=False)


def v2(root, files, path="/", mounted="/", **host):
    return machine(root, f"0::{path}\n", V2.format(mounted=mounted, at="/sys/fs/cgroup"), files, **host)


def v1(root, files, path="/", mounted="/", **host):
    lines = f"9:name=systemd:/x\n5:cpu,cpuacct:/y\n4:memory:{path}\n"
    return machine(root, lines, V1.format(mounted=mounted, at="/sys/fs/cgroup/memory"), files, **host)


def test_v2_limit_and_what_is_left_of_it(tmp_path):
    found = v2(tmp_path, {"memory.max": GIB, "memory.current": 256 * MIB})
    assert found.total.total == GIB
    assert found.host.available == 768 * MIB
    assert "memory.max" in found.host.source


def test_file_pages_that_can_go_do_not_count_as_used(tmp_path):
    stat = f"anon 1\ninactive_file {100 * MIB}\nactive_file {9 * MIB}\n"
    found = v2(tmp_path, {"memory.max": GIB, "memory.current": 256 * MIB, "memory.stat": stat})
    assert found.host.available == 868 * MIB


@pytest.mark.parametrize(
    "files", [{"memory.max": "max", "memory.current": 5}, {}, {"memory.max": ""}, {"memory.max": "?"}]
)
def test_no_limit_or_one_that_cannot_be_read_is_the_hosts(tmp_path, files):
    found = v2(tmp_path, files)
    assert (found.total.total, found.host.available, found.host.source) == (64 * GIB, 32 * GIB, "the machine")


def test_a_limit_above_the_host_is_none(tmp_path):
    found = v2(tmp_path, {"memory.max": 128 * GIB, "memory.current": 0})
    assert (found.total.total, found.host.available) == (64 * GIB, 32 * GIB)


def test_what_the_host_has_left_can_be_less_than_the_container(tmp_path):
    found = v2(tmp_path, {"memory.max": 48 * GIB, "memory.current": 0})
    assert (found.total.total, found.host.available) == (48 * GIB, 32 * GIB)


@pytest.mark.parametrize(("outer", "inner"), [(2 * GIB, 4 * GIB), (4 * GIB, 2 * GIB), (2 * GIB, "max")])
def test_nested_cgroups_the_least_counts(tmp_path, outer, inner):
    files = {"a/memory.max": outer, "a/memory.current": 0, "a/b/memory.max": inner, "a/b/memory.current": 0}
    found = v2(tmp_path, files, path="/a/b")
    assert found.total.total == found.host.available == 2 * GIB


def test_the_fullest_of_nested_cgroups_counts(tmp_path):
    files = {
        "a/memory.max": 4 * GIB,
        "a/memory.current": 4 * GIB - MIB,
        "a/b/memory.max": 2 * GIB,
        "a/b/memory.current": 0,
    }
    found = v2(tmp_path, files, path="/a/b")
    assert (found.total.total, found.host.available) == (2 * GIB, MIB)


def test_a_container_that_sees_only_its_own_cgroup(tmp_path):
    """Docker mounts the container's cgroup as the root of what it sees."""
    found = v2(tmp_path, {"memory.max": GIB, "memory.current": 0}, path="/docker/abc", mounted="/docker/abc")
    assert found.total.total == GIB
    found = v2(tmp_path, {"memory.max": GIB, "memory.current": 0}, path="/../other")
    assert found.total.total == GIB


def test_available_is_never_below_zero(tmp_path):
    assert v2(tmp_path, {"memory.max": GIB, "memory.current": 2 * GIB}).host.available == 0


def test_v1(tmp_path):
    files = {"memory/j/memory.limit_in_bytes": GIB, "memory/j/memory.usage_in_bytes": 256 * MIB}
    found = v1(tmp_path, files, path="/j")
    assert (found.total.total, found.host.available) == (GIB, 768 * MIB)


def test_v1_sentinel(tmp_path):
    files = {"memory/memory.limit_in_bytes": SENTINEL, "memory/memory.usage_in_bytes": 1}
    assert v1(tmp_path, files).total.total == 64 * GIB


def test_v1_nested(tmp_path):
    files = {"memory/memory.limit_in_bytes": SENTINEL, "memory/j/memory.limit_in_bytes": GIB}
    found = v1(tmp_path, files | {"memory/j/k/memory.limit_in_bytes": 3 * GIB}, path="/j/k")
    assert found.total.total == GIB


def test_v1_and_v2_at_once(tmp_path):
    """The hybrid layout: the memory controller is v1's, and the unified tree has no memory files."""
    mounts = V1.format(mounted="/", at="/sys/fs/cgroup/memory") + V2.format(mounted="/", at="/sys/fs/cgroup/unified")
    files = {"memory/j/memory.limit_in_bytes": GIB, "unified/j/cgroup.procs": 1}
    assert machine(tmp_path, "4:memory:/j\n0::/j\n", mounts, files).total.total == GIB


def test_no_proc_at_all(tmp_path):
    assert read_limits(tmp_path, of_process=False).total.total > 0


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process(name):
    """In a process of its own: what is set cannot be raised again."""
    code = f"""
import resource
from funzero.planning.limits import read_limits
from pathlib import Path
used = {{l.split()[0]: 1024 * int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("Vm")}}
soft = 2 * {2**30} + used["VmSize:"]
resource.setrlimit(resource.{name}, (soft, resource.getrlimit(resource.{name})[1]))
found = read_limits()
limit = next(x for x in found.found if x.source == "{name}")
assert limit.total == soft and 0 < limit.available < soft, limit
assert found.host.available <= limit.available and found.total.total <= soft
"""
    assert hasattr(resource, name)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_disk_and_device(tmp_path):
    found = read_limits(folder=tmp_path / "not" / "there", device=80 * GIB)
    assert found.disk is not None and 0 < found.disk.available <= found.disk.total
    assert found.device is not None and found.device.available == 80 * GIB
