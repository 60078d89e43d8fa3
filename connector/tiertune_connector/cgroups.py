"""Control groups of this process: its own and those around it, whose limits all hold for it."""

from collections.abc import Iterator
from pathlib import Path


def groups(controller: str, system: Path = Path("/")) -> Iterator[Path]:
    """Folders of the own group and of those around it, in version 2 and in version 1's hierarchy of a ``controller``.

    Not all of them need be there: in a container the own group may be named as the host names it, and lie where the
    outermost one should. Where nothing tells what is our own, the outermost ones. ``system`` has ``proc`` and ``sys``.
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
    """In a file; None where there is none, as where nothing limits a group."""
    told = text(path).strip()
    return int(told) if told.isdecimal() else None


def text(path: Path) -> str:
    """Of a file that may not be there."""
    try:
        return path.read_text()
    except OSError:
        return ""
