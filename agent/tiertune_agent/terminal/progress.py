"""A progress bar on standard error; nothing if that is no terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Step = Callable[[], object]


def unseen() -> None:
    """A step that is not shown."""


class Bar:
    """The bar, as the work uses it."""

    def __init__(self, progress: Progress, what: str, total: int) -> None:
        self._progress = progress
        # One step alone shows no progress before its end: the bar moves to and fro.
        self._task = progress.add_task(what, total=total if total > 1 else None)

    def step(self) -> None:
        """One more is done."""
        self._progress.advance(self._task)

    def aside(self, say: Callable[[], object]) -> None:
        """Print on standard output while the bar is away: both may be one terminal."""
        self._progress.stop()
        say()
        self._progress.start()


@contextmanager
def bar(what: str, total: int) -> Iterator[Bar]:
    """Shown until the end of the block, and gone then."""
    console = Console(stderr=True)
    # A variable such as FORCE_COLOR makes rich take a file for a terminal.
    shown = console.is_interactive and console.file.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, disable=not shown) as progress:
        yield Bar(progress, what, total)
