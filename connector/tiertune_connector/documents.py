"""Strict YAML documents: every problem with its file, line and column."""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from tiertune_connector.units import unit_of

Model = TypeVar("Model", bound=BaseModel)
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FLOAT, _TEXT = "tag:yaml.org,2002:float", "tag:yaml.org,2002:str"
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_PLAIN = {
    "model_type": "Input should be keys with values",
    "dict_type": "Input should be keys with values",
    "list_type": "Input should be a list",
    "tuple_type": "Input should be a list",
}
_HANDED_OVER = re.compile(r"/dev/(stdin|fd/\d+)|/proc/(self|\d+)/fd/\d+")
_MOST_NODES = 1_000_000
_DEEPEST = 100
_MOST_DIGITS = 1000
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


Json = dict[str, Any]
"""A JSON object."""
Extra = Literal["forbid", "ignore"]


class _Loader(_SafeLoader):  # type: ignore[misc]
    """Reads 989e12 as a number, though it has no point and no sign, as YAML 1.2 does; a key stays as written."""

    construct_scalar = yaml.constructor.BaseConstructor.construct_scalar
    """The safe one takes the value of a mapping's key `=`, past what is checked here."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        node.value = [(_as_written(key), value) for key, value in node.value]

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ANN401 (the base's)
        """Tells where a date is impossible, or a text not what its tag says: the base's errors are many, and bare."""
        kind, told = node.tag.rpartition(":")[2], ""
        if isinstance(node, yaml.ScalarNode) and node.tag != _TEXT and len(node.value) > _MOST_DIGITS:
            told = f"more than {_MOST_DIGITS} characters are no {kind}"  # the work may grow with their square
        elif isinstance(node, yaml.ScalarNode) and "\0" in node.value:
            told = "the character \\0 has no place here"  # nor in any path
        try:
            if not told:
                return super().construct_object(node, deep)
        except (ValueError, LookupError, ArithmeticError, AttributeError):
            told = f"{node.value!r} is no {kind}"
        raise yaml.constructor.ConstructorError(None, None, told, node.start_mark)


def _as_written(key: yaml.Node) -> yaml.Node:
    """A key as a text: a node of its own, as an alias's is also a value elsewhere."""
    if not isinstance(key, yaml.ScalarNode):
        return key
    return yaml.ScalarNode(_TEXT, key.value, key.start_mark, key.end_mark)


_Loader.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))


class Document(BaseModel):
    """Base of every document that people write: frozen, and an unknown key is an error.

    The docstring of a field is its description in schemas and references.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def beside(self, folder: Path) -> Self:
        """A copy whose paths, and those of documents in its fields, start at ``folder``."""
        moved: dict[str, Path | Document] = {}
        for name, value in self:
            if isinstance(value, Path):
                moved[name] = folder / value
            elif isinstance(value, Document):
                moved[name] = value.beside(folder)
        return self.model_copy(update=moved)


class DocumentError(ValueError):
    """A document that cannot be used; ``problems`` are lines of ``file:line:column: field: what to mend``."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class FieldError(ValueError):
    """JSON that cannot be used; ``field`` is the dotted path of the wrong field, empty for the whole."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message

    @classmethod
    def of(cls, error: ValidationError) -> Self:
        """From the first of the error's problems."""
        problem = error.errors()[0]
        unknown, told = problem["type"] == "extra_forbidden", problem["msg"].removeprefix("Value error, ")
        field = ".".join(str(part) for part in problem["loc"] if part != "[key]")
        return cls(field, "unknown field" if unknown else told)


def load_yaml(path: Path | str, model: type[Model]) -> Model:
    """The document in ``path``, or DocumentError naming every place that is wrong."""
    return parse_yaml(read_text(path), model, name=str(path))


def read_text(path: Path | str, *, newline: str | None = None) -> str:
    """The text in ``path``, or DocumentError saying why it cannot be read. Its line ends are as ``open`` makes them."""
    try:
        with plain_file(Path(path)).open(encoding="utf-8", newline=newline) as file:
            return file.read().removeprefix("\ufeff")
    except OSError as error:
        raise DocumentError([f"{path}: cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        place = _behind(error.object[: error.start].decode("utf-8-sig"))
        raise DocumentError([f"{path}:{place}: cannot be read: is not UTF-8 text"]) from error


def plain_file(path: Path) -> Path:
    """The same path; OSError if it is a pipe or a device, which may keep a reader waiting for ever.

    What was opened for this process is let through, such as ``/dev/stdin`` or a shell's ``<(...)``: somebody writes it.
    """
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or _HANDED_OVER.fullmatch(str(path))):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path


def stamp(path: Path) -> tuple[int, int, int] | None:
    """What differs when a file was changed or exchanged, or got another owner or mode; None: it is not there."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_ctime_ns, seen.st_size, seen.st_ino  # not mtime: who may read the file may change by itself


def where(error: OSError) -> str:
    """``path: why``, without Python's error number, if the error names a path; else its usual text."""
    if not error.filename or not error.strerror:
        return str(error)
    why = "is there, and is no directory" if isinstance(error, FileExistsError) else error.strerror
    return f"{os.fsdecode(error.filename)}: {why}"


def keys_in(path: Path) -> set[str]:
    """The keys of the YAML document in ``path``; DocumentError if it is none."""
    _, data = _parsed(read_text(path), str(path))
    return set(data) if isinstance(data, dict) else set()


def parse_yaml(text: str, model: type[Model], *, name: str) -> Model:
    """As load_yaml, for a text that messages call ``name``."""
    root, data = _parsed(text, name)
    try:
        return validated(model, data)
    except ValidationError as error:
        told = sorted(_describe(root, problem, model) for problem in _causes(error.errors()))
        raise DocumentError([f"{name}:{line}:{column}: {text}" for line, column, text in told]) from error
    except TypeError as error:
        raise DocumentError([f"{name}:1:1: {error}"]) from error


def _parsed(text: str, name: str) -> tuple[yaml.Node, object]:
    """The nodes with their places, and the value; DocumentError if it is not YAML, or no document of ours."""
    try:
        _check_depth(text)
        root = yaml.compose(text, Loader=_Loader)
        if root is None:
            raise DocumentError([f"{name}:1:1: the file is empty"])
        if _nodes(root, {}) > _MOST_NODES:
            raise DocumentError([f"{name}:1:1: with what its aliases stand for it has more than {_MOST_NODES} values"])
        repeated = list(_repeated(root))
        data = yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader; merges are copied)
    except RecursionError:
        raise DocumentError([f"{name}:1:1: nested too deeply, or in itself"]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
        raise DocumentError([f"{name}:{place}: not YAML: {error.problem or error.context}"]) from error
    except yaml.reader.ReaderError as error:
        place = _behind(text.encode()[: error.position].decode(errors="ignore"))
        raise DocumentError([f"{name}:{place}: not YAML: {error.reason}"]) from error
    if repeated:
        raise DocumentError(
            [f"{name}:{_place(key)}: {key.value}: the key stands here a second time" for key in repeated]
        )
    return root, data


def parse_json(model: type[Model], data: object, *, extra: Extra = "forbid") -> Model:
    """As ``validated``, but FieldError, which names the first field that is wrong."""
    try:
        return validated(model, data, extra=extra)
    except ValidationError as error:
        raise FieldError.of(error) from error


def validated(model: type[Model], data: object, *, extra: Extra = "forbid") -> Model:
    """The document in parsed JSON or YAML; text is not taken for a number, nor 1 for true.

    ``extra``: what is made of fields that the model does not know.
    ValidationError; TypeError for a type that JSON lacks.
    """
    return model.model_validate_json(json.dumps(data, default=_written), strict=True, extra=extra)


def _written(value: object) -> str:
    if isinstance(value, date):  # YAML makes dates of such text
        return value.isoformat()
    raise TypeError(f"expected text, numbers, lists and keys with values, not a {type(value).__name__}")


def differences(before: Any, after: Any, field: str = "") -> Iterator[tuple[str, list[Any]]]:  # noqa: ANN401 (JSON)
    """Fields of two JSON documents that differ, by their dotted paths, with both values."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys((*before, *after)):
            yield from differences(before.get(key), after.get(key), f"{field}.{key}" if field else key)
    elif before != after:
        yield field, [before, after]


def place_of(text: str, field: str) -> str:
    """``line:column`` of the key at a dotted path in a sound document, or of the last part of it that is written."""
    node, place = yaml.compose(text, Loader=_Loader), "1:1"
    for part in field.split("."):
        found = _child(node, part)
        if found is None:
            break
        place, node = _place(found[0]), found[1]
    return place


def _child(node: yaml.Node | None, part: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Where a key or an entry of a list stands, and its value; None: it is not written there."""
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
        return node.value[int(part)], node.value[int(part)]
    return None


def _behind(text: str) -> str:
    """``line:column`` of what follows this beginning of a file."""
    *above, line = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return f"{len(above) + 1}:{len(line) + 1}"


def _place(node: yaml.Node) -> str:
    return f"{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _check_depth(text: str) -> None:
    """YAML error where lists and keys are nested too deeply: libyaml would overrun the stack of the process."""
    depth, events = 0, cast("Iterator[Any]", yaml.parse(text, Loader=_Loader))  # its marks have two types
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=event.start_mark)


def _nodes(node: yaml.Node, counted: dict[int, int]) -> int:
    """Number of keys and values with all aliases expanded: a few lines can stand for more than any memory holds."""
    if id(node) not in counted:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        items = node.value if isinstance(node, yaml.SequenceNode) else chain.from_iterable(pairs)
        counted[id(node)] = 1 + sum(_nodes(each, counted) for each in items)
    return counted[id(node)]


def _repeated(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):  # the loader itself refuses other kinds
                if key.value in seen:
                    yield key
                seen.add(key.value)
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated(item)


def _causes(problems: Sequence[Any]) -> list[Any]:
    """Leave out that a list is too short if its items have problems: these are the cause."""
    wrong = {tuple(problem["loc"][:length]) for problem in problems for length in range(len(problem["loc"]))}
    return [problem for problem in problems if problem["type"] != "too_short" or problem["loc"] not in wrong]


def _describe(node: yaml.Node, problem: Any, model: type[BaseModel]) -> tuple[int, int, str]:  # noqa: ANN401 (pydantic's)
    """Line, column, and what is wrong there."""
    location: yaml.Node = node
    path: list[str] = []
    for part in map(str, problem["loc"]):
        found = _child(node, part)
        if found is not None or isinstance(node, yaml.MappingNode):
            path.append(part)
        if found is not None:
            key, node = found
            location = key if problem["type"] in ("extra_forbidden", "invalid_key") else node
    field, mark = ".".join(path), location.start_mark
    return mark.line + 1, mark.column + 1, f"{field + ': ' if field else ''}{_message(problem, location, model)}"


def _message(problem: Any, node: yaml.Node, model: type[BaseModel]) -> str:  # noqa: ANN401 (pydantic's ErrorDetails)
    """What is wrong, in words of YAML, not of JSON and Python; a bound has the unit that ``node`` is written in."""
    kind = problem["type"]
    if kind == "extra_forbidden":
        return unknown_key(model, problem["loc"])
    if kind == "too_short":
        return f"name at least {problem['ctx']['min_length']}"
    if kind in _BOUNDS and isinstance(node, yaml.ScalarNode) and (unit := unit_of(node.value)):
        return f"{problem['msg']} {unit}"
    return _PLAIN.get(kind) or problem["msg"].removeprefix("Value error, ")


def unknown_key(model: type[BaseModel], place: Sequence[str | int]) -> str:
    """Says that the last part of ``place`` is no key there, and names the nearest that is one."""
    *above, key = place
    found = [model]
    for part in above:
        fields = (each.model_fields.get(str(part)) for each in found)
        # A part that is no field is one of a list, a name that a file gives, or names one of a union's models.
        found = [one for field in fields if field for one in _models(field.annotation)] or found
    known = [field.alias or name for each in found for name, field in each.model_fields.items()]
    nearest = get_close_matches(str(key), known, 1)
    return f"unknown key: did you mean {nearest[0]}?" if nearest else "unknown key"


def _models(kind: Any) -> list[type[BaseModel]]:  # noqa: ANN401 (a type)
    """The documents that a field of this type may hold, in lists and by names too."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [kind]
    return [one for each in get_args(kind) for one in _models(each)]
