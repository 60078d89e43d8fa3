"""The fields of a settings model as rows of a table: one source for what a field is called, takes and means."""

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import time
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from tiertune_connector.units import parse_duration, parse_useful_size

_PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path", time: "time of day"}
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_BYTES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


@dataclass(frozen=True)
class Row:
    """One field; ``meaning`` is its docstring."""

    name: str
    """Dotted; ``[]`` is an entry of a list, ``<NAME>`` a key of the writer's choice."""
    kind: str
    default: str
    bounds: str
    meaning: str


def rows(model: type[BaseModel], prefix: str = "") -> Iterator[Row]:
    """Every field of a document, in order; the fields of a document in it follow it."""
    for name, field in model.model_fields.items():
        place = f"{prefix}{field.alias or name}"
        inner, place_within = _documents(field.annotation), place
        meaning = _meaning(model, name)
        if inner is None or meaning:
            yield _row(place, field, meaning)
        if inner is None:
            continue
        if get_origin(field.annotation) is tuple:
            place_within = f"{place}[]"
        elif get_origin(field.annotation) is dict:
            place_within = f"{place}.<DIGEST>"
        yield from (row for row in rows(inner, f"{place_within}.") if not _repeats(model, inner, row, place_within))


def _repeats(outer: type[BaseModel], inner: type[BaseModel], row: Row, place: str) -> bool:
    """Whether an entry's field repeats one of its document, which has its row already."""
    own = row.name.removeprefix(f"{place}.").partition(".")[0].removesuffix("[]")
    bases = set(outer.__mro__) & set(inner.__mro__)
    return any(own in getattr(base, "model_fields", {}) for base in bases)


def _row(place: str, field: FieldInfo, meaning: str) -> Row:
    kind, constraints = _kind(field.annotation, field.metadata)
    kind = kind or "mapping"
    default = "" if isinstance(field.default, BaseModel) else _default(field, kind)
    return Row(place, kind, default, _bounds(constraints, kind), meaning)


def _documents(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401 (a type)
    """The model of a mapping, or of the entries of a list or mapping; None: a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_documents(part) for part in get_args(annotation))
    return next((model for model in found if model), None)


def _meaning(model: type[BaseModel], name: str) -> str:
    """The field's docstring, else that of the field that it overrides."""
    bases = (base.model_fields for base in model.__mro__ if issubclass(base, BaseModel) and base is not BaseModel)
    told = (fields[name].description for fields in bases if name in fields)
    return " ".join((next(filter(None, told), None) or "").replace("``", "`").split())


def _kind(annotation: Any, metadata: Sequence[Any]) -> tuple[str, list[Any]]:  # noqa: ANN401 (a type)
    """A value's kind, and what bounds it; an empty kind is a document."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return _kind(inner, [*more, *metadata])
    constraints = [one for item in metadata for one in (item.metadata if isinstance(item, FieldInfo) else [item])]
    parsers = {item.func for item in constraints if isinstance(item, BeforeValidator)}
    for parser, kind in ((parse_useful_size, "size"), (parse_duration, "duration")):
        if parser in parsers:
            return kind, constraints
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts), constraints
    if origin in (Union, types.UnionType):
        told = [_kind(part, ()) for part in parts if part is not type(None)]
        return " or ".join(kind for kind, _ in told), [*constraints, *(one for _, more in told for one in more)]
    if origin is tuple:
        kind, _ = _kind(parts[0], ())
        return f"list of {kind or 'mappings'}", constraints
    return _PLAIN.get(annotation, ""), constraints


def _bounds(constraints: Sequence[Any], kind: str) -> str:
    above = [(one.gt, "above") for one in constraints if isinstance(one, Gt)]
    least: list[tuple[Any, str]] = [*above, *((one.ge, "from") for one in constraints if isinstance(one, Ge))]
    below = [(one.lt, "below") for one in constraints if isinstance(one, Lt)]
    most: list[tuple[Any, str]] = [*below, *((one.le, "to") for one in constraints if isinstance(one, Le))]
    tightest = [*_first(least, max), *_first(most, min)]
    told = [f"{word} {_value(value, kind)}" for value, word in tightest]
    if told == ["from 0"] and kind in ("size", "duration"):
        told = []
    unit = "entries" if kind.startswith("list") else "characters"
    told += [f"at least {one.min_length} {unit}" for one in constraints if isinstance(one, MinLen)]
    told += [f"at most {one.max_length} {unit}" for one in constraints if isinstance(one, MaxLen)]
    patterns = (getattr(one, "pattern", None) for one in constraints)
    told += [f"`{pattern}`" for pattern in patterns if pattern]
    return ", ".join(told)


def _first(bounds: Sequence[tuple[Any, str]], pick: Callable[..., Any]) -> list[tuple[Any, str]]:
    """The tightest bound; of equal ones the first, which excludes the value itself."""
    return [pick(bounds, key=lambda bound: bound[0])] if bounds else []


def _default(field: FieldInfo, kind: str) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "empty" if field.default_factory is dict else "by rule"
    return _value(field.default, kind)


def _value(value: Any, kind: str) -> str:  # noqa: ANN401 (whatever a field holds)
    """As one would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return _number(value, kind)
    if isinstance(value, tuple):
        return ", ".join(_value(one, "") for one in value) or "empty"
    return f"`{value}`" if str(value) else "empty"


def _number(value: float, kind: str) -> str:
    if kind == "duration" and 0 < value < 1:
        return f"{value * 1000:g}ms"
    units = {"size": _BYTES, "duration": _SECONDS}.get(kind, {})
    unit = next((unit for unit, factor in units.items() if value and value % factor == 0), None)
    if unit:
        return f"{value / units[unit]:.7g}{unit}"
    return f"2^{value.bit_length() - 1}" if isinstance(value, int) and value >= 2**31 else f"{value:g}"
