"""How many processors a process believes to have."""

import pytest

from connector.control_groups import pretend
from tiertune_connector import cgroups
from tiertune_connector.cgroups import usable_processors

V1 = "12:cpuset:/\n4:cpu,cpuacct:{0}\n0::/unified\n"
V2 = "0::{0}\n"


@pytest.fixture(autouse=True)
def _host_of_64(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))


def v1(folder, quota, period="100000"):
    return {f"{folder}cpu.cfs_quota_us": f"{quota}\n", f"{folder}cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("groups", "files", "processors"),
    [
        (V2.format("/"), {"cpu.max": "200000 100000\n"}, 2),
        (V2.format("/"), {"cpu.max": "250000 100000\n"}, 2),
        (V2.format("/"), {"cpu.max": "10000 100000\n"}, 1),
        (V2.format("/"), {"cpu.max": "max 100000\n"}, 64),
        (V2.format("/"), {"cpu.max": "9900000 100000\n"}, 64),
        (V2.format("/"), {}, 64),
        (V2.format("/pod/one"), {"pod/one/cpu.max": "max 100000\n", "pod/cpu.max": "400000 50000\n"}, 8),
        (V2.format("/pod/one"), {"pod/one/cpu.max": "300000 100000\n", "pod/cpu.max": "800000 100000\n"}, 3),
        (V2.format("/pod/one"), {"other/cpu.max": "100000 100000\n"}, 64),
        (V1.format("/"), v1("cpu/", 200000), 2),
        (V1.format("/"), v1("cpu/", -1), 64),
        (V1.format("/kubepods/pod/one"), v1("cpu/", 200000), 2),
        (V1.format("/pod/one"), v1("cpu/pod/one/", -1) | v1("cpu/pod/", 1200000) | v1("cpu/", -1), 12),
        ("", {}, 64),
    ],
)
def test_a_containers_quota_counts(monkeypatch, tmp_path, groups, files, processors):
    """Both versions of control groups, the own group and those around it; of a processor a part is none."""
    pretend(monkeypatch, tmp_path, groups, **files)
    assert usable_processors() == processors


def test_a_host_without_control_groups_tells_its_processors(monkeypatch, tmp_path):
    """Nothing is there to be read."""
    assert 1 <= usable_processors() <= 64
    monkeypatch.setattr(cgroups, "SYSTEM", tmp_path)
    assert usable_processors() == 64
