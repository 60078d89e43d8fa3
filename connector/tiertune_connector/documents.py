"""Strict YAML documents: every problem with its file, line and column."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from tiertune_connector.units import unit_of

Model = TypeVar("Model", bound=BaseModel)
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FLOAT, _TEXT = "tag:yaml.org,2002:float", "tag:yaml.org,2002:str"
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
_PLAIN = {
    "extra_forbidden": "unknown key",
    "model_type": "Input should be keys with values",
    "dict_type": "Input should be keys with values",
    "list_type": "Input should be a list",
    "tuple_type": "Input should be a list",
}
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(_SafeLoader):  # type: ignore[misc]
    """As YAML 1.2 has it, 989e12 is a number too, without a point and a sign; as a key it is what is written."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: ANN401 (the base's)
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag == _FLOAT:
                key.tag = _TEXT
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))


class Document(BaseModel):
    """Base of every document that people write: frozen, and an unknown key is an error.

    The docstring of a field is its description in schemas and references.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def beside(self, folder: Path) -> Self:
        """The same with its paths, and those of the documents that are its fields, starting at ``folder``."""
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
    """JSON that cannot be used; ``field`` is the dotted path of what is wrong, empty where it is the whole."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field
        self.message = message

    @classmethod
    def of(cls, error: ValidationError) -> Self:
        """The first of its problems."""
        problem = error.errors()[0]
        unknown = problem["type"] == "extra_forbidden"
        return cls(".".join(map(str, problem["loc"])), "unknown field" if unknown else problem["msg"])


def load_yaml(path: Path | str, model: type[Model]) -> Model:
    """The document in ``path``, or DocumentError naming every place that is wrong."""
    return parse_yaml(read_text(path), model, name=str(path))


def read_text(path: Path | str) -> str:
    """The text in ``path``, or DocumentError saying why it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise DocumentError([f"{path}: cannot be read: {reason}"]) from error


def where(error: OSError) -> str:
    """``path: why``, where the error names a path, without the number that Python puts before it."""
    if not error.filename or not error.strerror:
        return str(error)
    why = "is there, and is no directory" if isinstance(error, FileExistsError) else error.strerror
    return f"{os.fsdecode(error.filename)}: {why}"


def parse_yaml(text: str, model: type[Model], *, name: str) -> Model:
    """As load_yaml, of a text that is called ``name`` in messages."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        repeated = list(_repeated(root))
        data = yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader)
    except RecursionError:
        raise DocumentError([f"{name}:1:1: nested too deeply, or in itself"]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{mark.line + 1}:{mark.column + 1}" if mark else "1:1"
        raise DocumentError([f"{name}:{place}: not YAML: {error.problem or error.context}"]) from error
    except (yaml.YAMLError, ValueError) as error:  # also a date or number that cannot be
        raise DocumentError([f"{name}:1:1: not YAML: {error}"]) from error
    if root is None:
        raise DocumentError([f"{name}:1:1: the file is empty"])
    if repeated:
        raise DocumentError(
            [f"{name}:{_place(key)}: {key.value}: the key stands here a second time" for key in repeated]
        )
    try:
        return validated(model, data)
    except ValidationError as error:
        raise DocumentError([_describe(name, root, problem) for problem in _causes(error.errors())]) from error
    except TypeError as error:
        raise DocumentError([f"{name}:1:1: {error}"]) from error
    except ValueError as error:  # hexadecimal, of more than 4300 digits
        raise DocumentError([f"{name}:1:1: a number has too many digits"]) from error


def validated(model: type[Model], data: object) -> Model:
    """The document in what JSON or YAML gave, where text is no number and 1 is not true.

    ValidationError; TypeError of what JSON does not have, ValueError of a number that is too long for it.
    """
    return model.model_validate_json(json.dumps(data, default=_written), strict=True)


def _written(value: object) -> str:
    if isinstance(value, date):  # YAML takes one for a date
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
    """``line:column`` of the key that a dotted path leads to in a sound document, as far as it is written there."""
    node, place = yaml.compose(text, Loader=_Loader), "1:1"
    for part in field.split("."):
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == part), None)
            if pair is None:
                break
            place, node = _place(pair[0]), pair[1]
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            place = _place(node)
        else:
            break
    return place


def _place(node: yaml.Node) -> str:
    return f"{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _repeated(node: yaml.Node | None) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):  # another kind the loader refuses by itself
                if key.value in seen:
                    yield key
                seen.add(key.value)
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated(item)


def _causes(problems: Sequence[Any]) -> list[Any]:
    """Without lists that are too short for what is wrong with their items: it is told of these."""
    wrong = {tuple(problem["loc"][:length]) for problem in problems for length in range(len(problem["loc"]))}
    return [problem for problem in problems if problem["type"] != "too_short" or problem["loc"] not in wrong]


def _describe(name: str, node: yaml.Node, problem: Any) -> str:  # noqa: ANN401 (pydantic's ErrorDetails)
    location: yaml.Node = node
    path: list[str] = []
    for part in problem["loc"]:
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == str(part)), None)
            if pair is not None:
                location = pair[0] if problem["type"] in ("extra_forbidden", "invalid_key") else pair[1]
                node = pair[1]
            path.append(str(part))
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = location = node.value[part]
            path.append(str(part))
    if problem["type"] == "missing" and problem["loc"]:
        path = [*path[:-1], str(problem["loc"][-1])]
    field = ".".join(path)
    return f"{name}:{_place(location)}: {field + ': ' if field else ''}{_message(problem, location)}"


def _message(problem: Any, node: yaml.Node) -> str:  # noqa: ANN401 (pydantic's ErrorDetails)
    """What is wrong in the words of YAML, not of JSON and Python; a bound with the unit that ``node`` is written in."""
    kind = problem["type"]
    if kind == "too_short":
        return f"name at least {problem['ctx']['min_length']}"
    if kind in _BOUNDS and isinstance(node, yaml.ScalarNode) and (unit := unit_of(node.value)):
        return f"{problem['msg']} {unit}"
    return _PLAIN.get(kind) or problem["msg"].removeprefix("Value error, ")
