"""How much memory a store believes that it can still have."""

from pathlib import Path

import pytest

from connector.control_groups import pretend
from tiertune_connector.tiers.linux import most_memory, spare_memory

GIB = 1 << 30
V1 = "12:cpuset:/\n4:memory:{0}\n0::/unified\n"
V2 = "0::{0}\n"


def v2(folder, limit, used, cached=0):
    """Limit, what is used of it, and how much of that only caches files, in GiB."""
    return {
        f"{folder}memory.max": f"{limit if limit == 'max' else limit * GIB}\n",
        f"{folder}memory.current": f"{int(used * GIB)}\n",
        f"{folder}memory.stat": f"anon 5\nactive_file {7 * GIB}\ninactive_file {cached * GIB}\n",
    }


def v1(folder, limit, used, cached=0):
    stat = f"inactive_file 0\ntotal_inactive_file {cached * GIB}\n"
    return {
        f"memory/{folder}memory.limit_in_bytes": f"{limit * GIB}\n",
        f"memory/{folder}memory.usage_in_bytes": f"{used * GIB}\n",
        f"memory/{folder}memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("groups", "files", "spare"),
    [
        (V2.format("/"), {}, 63.5),
        (V2.format("/"), v2("", 10, 4, 1), 6.5),
        (V2.format("/"), v2("", 1, 0.25), 0.5),
        (V2.format("/"), v2("", 1, 1), -0.25),
        (V2.format("/host/name"), v2("", 10, 4), 5.5),
        (V2.format("/"), v2("", 10, 4) | {"memory.high": f"{8 * GIB}\n"}, 3.5),
        (V2.format("/"), v2("", 10, 4) | {"memory.high": "max\n"}, 5.5),
        (V2.format("/pod/one"), v2("pod/one/", "max", 3) | v2("pod/", 10, 8, 1), 2.5),
        (V2.format("/pod/one"), v2("pod/one/", 5, 3) | v2("pod/", 100, 8), 1.5),
        (V2.format("/a/b/c"), v2("a/b/c/", 50, 1) | v2("a/b/", "max", 9) | v2("a/", 20, 15), 4.5),
        (V2.format("/pod/one"), v2("other/", 1, 1), 63.5),
        (V2.format("/pod/one"), v2("pod/one/", 900, 1), 63.5),
        (V1.format("/"), v1("", 10, 4, 2), 7.5),
        (V1.format("/pod/one"), v1("pod/one/", 1 << 33, 3) | v1("pod/", 10, 8) | v1("", 1 << 33, 9), 1.5),
        ("", {}, 63.5),
        ("", v2("", 10, 4, 1), 6.5),
        ("", v1("", 10, 4, 2), 7.5),
    ],
)
def test_a_limit_of_any_group_around_us_counts(monkeypatch, tmp_path, groups, files, spare):
    """Of both versions of control groups: who exceeds one is killed or slowed, though the own group has no limit.

    A quarter of each stays free, half a GiB at most: a store that took all but a segment of it was killed by a burst.
    """
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {128 << 20} kB\nMemAvailable: {64 << 20} kB\n")
    pretend(monkeypatch, tmp_path, groups, **files)
    assert spare_memory() == pytest.approx(spare * GIB, abs=1)


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, 127.5),
        (v2("pod/one/", "max", 3) | v2("pod/", 10, 8, 1), 9.5),
        (v2("pod/one/", 1, 1) | v2("pod/", 10, 8, 1), 0.75),
        (v2("pod/one/", 900, 1), 127.5),
    ],
)
def test_the_most_is_what_nobody_else_could_leave_less_of(monkeypatch, tmp_path, files, most):
    """Of the machine and every group, without what stays free: more than that no store ever has."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {128 << 20} kB\nMemAvailable: {64 << 20} kB\n")
    pretend(monkeypatch, tmp_path, V2.format("/pod/one"), **files)
    assert most_memory() == most * GIB


def test_it_is_what_the_machine_tells():
    """It is positive, and not more than the machine has."""
    total = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert 0 < spare_memory() <= most_memory() <= total * 1024
