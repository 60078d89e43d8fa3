"""A system of which only control groups are pretended."""


def system(root, groups, **files):
    """One whose process is in ``groups``, with files of control groups."""
    told = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in told.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
