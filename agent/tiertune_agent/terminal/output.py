"""Standard output whose reader may leave."""

from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Heard(FileIO):
    """A file that drops what nobody reads. Any other failure is told once: at its end Python writes the rest again."""

    _failed = False

    def write(self, told: "ReadableBuffer", /) -> int:
        try:
            return memoryview(told).nbytes if self._failed else super().write(told)
        except OSError as error:
            self._failed = True
            if isinstance(error, BrokenPipeError):
                return memoryview(told).nbytes
            raise


def heard(output: TextIOWrapper) -> TextIOWrapper:
    """The same output, but a reader that leaves, as ``head`` does, does not end the work: its results are elsewhere."""
    file = BufferedWriter(_Heard(output.fileno(), "w", closefd=False))
    return TextIOWrapper(file, output.encoding, output.errors, line_buffering=output.line_buffering)
