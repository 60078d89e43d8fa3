"""A system of which only control groups are pretended."""

from tiertune_connector import cgroups


def pretend(monkeypatch, root, groups, **files):
    """Have the process be in ``groups`` of a system at ``root``, with files of control groups."""
    told = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in told.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(cgroups, "SYSTEM", root)
