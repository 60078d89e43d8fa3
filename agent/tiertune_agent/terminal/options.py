"""What the commands share: options, output, results, failures. Light: ``--help`` imports it."""

import json
import os
from collections.abc import Callable
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Parsed = TypeVar("Parsed")
AGENT = "http://127.0.0.1:7420"
TRACE = "Parquet file, or an included trace: lmcache_agents, shift_mix_slice."
Config = Annotated[Path, typer.Option(help="YAML file.")]
_COMMANDS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\N{REPLACEMENT CHARACTER}")
"""Control characters except tab and newline."""


class InputError(ValueError):
    """What was asked for is wrong; the message says what to mend."""


def writable(path: Path | None) -> Path | None:
    """Refuses a path that cannot be written: before the work, not after it."""
    if path is None:
        return None
    folder = Path(os.path.realpath(path)).parent  # a link makes the file that it names, where that is
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long
        raise typer.BadParameter(f"{error.strerror}: {path}") from None
    if is_folder:
        raise typer.BadParameter(f"{path} is a folder: name a file in it")
    if not folder.is_dir():
        raise typer.BadParameter(f"the folder of {path} does not exist: make it, or name another file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written: permission denied")
    return path


JsonPath = Annotated[
    Path | None, typer.Option("--json", help="Write the result to this file.", metavar="PATH", callback=writable)
]


def parsed(option: str, parse: Callable[[str], Parsed], text: str) -> Parsed:
    """What ``parse`` makes of an option's text; its ValueError becomes an InputError that names the option."""
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(f"{option}: {error}") from None


def server(option: str, what: str, url: str) -> str:
    """The address of our ``what``; InputError says what is wrong with it."""
    from tiertune_agent.network import web_address  # noqa: PLC0415 (--help is quick)

    login = "the file that TIERTUNE_TOKEN_FILE names has the token"
    return parsed(option, lambda text: web_address(text, f"the {what}'s address as http://host:port", login=login), url)


AgentUrl = Annotated[
    str,
    typer.Option(
        "--agent",
        envvar="TIERTUNE_AGENT",
        help="The agent's address. TIERTUNE_TOKEN_FILE names the file with the token.",
    ),
]


def fail(message: str, code: int) -> NoReturn:
    typer.echo(printable(message), err=True)
    raise typer.Exit(code)


def say(told: str, document: object, json_path: Path | None) -> None:
    """Tell people, and write the document to the path of ``--json``."""
    typer.echo(told)
    result(document, json_path)


def result(document: object, json_path: Path | None) -> None:
    """Write the document to the path of ``--json``."""
    if json_path:
        write(json_path, json.dumps(document, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """Write a result; an OSError names the file, also that of a full disk."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        error.filename = str(path)
        raise


def printable(told: Any) -> Any:  # noqa: ANN401 (JSON)
    """What others wrote, at any depth, without control characters that a terminal would obey."""
    if isinstance(told, str):
        return told.translate(_COMMANDS)
    if isinstance(told, dict):
        return {printable(name): printable(value) for name, value in told.items()}
    return [printable(one) for one in told] if isinstance(told, list) else told


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
