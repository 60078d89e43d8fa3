"""Control groups of this process: its own and the groups around it, all of whose limits hold for it."""

from collections.abc import Iterator
from pathlib import Path


def groups(controller: str, system: Path = Path("/")) -> Iterator[Path]:
    """Folders of this process's groups, own first, in version 2 and in version 1's hierarchy of a ``controller``.

    Some may not exist: in a container the own group may have the name that the host gives it, yet lie where the
    outermost one should. If the own group is unknown, only the outermost ones. ``system`` has ``proc`` and ``sys``.
    """
    tops = system / "sys/fs/cgroup", system / "sys/fs/cgroup" / controller
    told = text(system / "proc/self/cgroup").splitlines()
    if not told:
        yield from tops
    for line in told:
        number, controllers, own = line.split(":", 2)
        if number == "0" or controller in controllers.split(","):
            top = tops[number != "0"]
            group = top / own.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(top))


def number(path: Path) -> int | None:
    """The number in a file; None if there is none, as for a group without a limit."""
    told = text(path).strip()
    return int(told) if told.isdecimal() else None


def text(path: Path) -> str:
    """A file's text; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
