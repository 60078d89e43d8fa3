"""Traces of block chains in parquet: loaded whole, and checked before use."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tiertune_connector.eviction import Key

Ints = npt.NDArray[np.int64]
Names = npt.NDArray[np.integer[Any]]
"""Block ids of any width: hashes may take all of 64 bits."""
_MOST_DIGITS = 9

BUILTIN = ("lmcache_agents", "shift_mix_slice")
"""Traces that come with the package; their names work wherever a file does."""


class TraceError(ValueError):
    """A trace that cannot be used; the message names file, row (from 0) and column."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of time. All arrays have one entry per request but ``ids`` (one per block access)."""

    name: str
    block_tokens: int
    t: npt.NDArray[np.float64]
    """Arrival, seconds, ascending."""
    input_len: Ints
    """Prompt tokens."""
    session: Ints
    """The conversation that the request belongs to."""
    type: list[str]
    """What made the request."""
    offsets: Ints
    """Request r's chain is ``ids[offsets[r]:offsets[r + 1]]``; one entry more than requests."""
    ids: Ints
    """Block ids; an id names a block and its whole prefix."""

    def __len__(self) -> int:
        return len(self.t)

    @property
    def accesses(self) -> int:
        return len(self.ids)

    @cached_property
    def unique(self) -> int:
        """Number of different blocks."""
        return int(np.count_nonzero(np.bincount(self.ids)))

    @cached_property
    def chains(self) -> list[list[Key]]:
        """The block ids of every request, from the head of its prompt: to a pool a key is anything hashable."""
        ids, bounds = self.ids.tolist(), self.offsets.tolist()
        return [ids[start:end] for start, end in pairwise(bounds)]


def builtin_trace(name: str) -> Trace:
    """One of ``BUILTIN``."""
    return load_trace(Path(str(files("tiertune_agent.replay") / "data" / f"{name}.parquet")))


def open_trace(name: str) -> Trace:
    """The trace in the file ``name``, or the shipped one of that name if there is no such file."""
    return builtin_trace(name) if name in BUILTIN and not Path(name).is_file() else load_trace(Path(name))


def load_trace(path: Path) -> Trace:
    """The trace in a parquet file, or TraceError."""
    if path.is_dir():
        raise TraceError(f"{path}: is a directory: name a file in it")
    if not path.is_file():
        raise TraceError(f"{path}: there is no such file; the included traces are {', '.join(BUILTIN)}")
    try:
        return _read(path.stem, pq.read_table(path))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:  # some damage shows in values only
        reason = str(error).splitlines()[0]
        raise TraceError(f"{path}: cannot be read as parquet: {reason}") from error


def _read(name: str, table: Any) -> Trace:  # noqa: ANN401 (pyarrow has no types)
    if not table.num_rows:
        raise TraceError("there is nothing in it: no requests")
    offsets, names = _chains(table, "hash_ids")
    ids = np.unique(names, return_inverse=True)[1] if names.max() >= names.size else names
    trace = Trace(
        name=name,
        block_tokens=_block_size(table),
        t=_column(table, "t", _is_number, "numbers").to_numpy(zero_copy_only=False).astype(np.float64),
        input_len=_integers(table, "input_len"),
        session=_integers(table, "session"),
        type=_column(table, "type", _is_text, "text").to_pylist(),
        offsets=offsets,
        ids=ids.astype(np.int64),
    )
    _check_requests(trace)
    _check_parents(trace, names)
    return trace


def _column(table: Any, name: str, accepts: Callable[[Any], bool], expected: str) -> Any:  # noqa: ANN401
    """A column without missing values, of a type that ``accepts`` it."""
    if name not in table.column_names:
        raise TraceError(f"column {name!r} is missing; there are {table.column_names}")
    column = _plain(table[name].combine_chunks())
    if not accepts(column.type):
        raise TraceError(f"column {name!r} has type {column.type}, expected {expected}")
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise TraceError(f"row {row}, column {name!r}: a value is missing")
    return column


def _plain(column: Any) -> Any:  # noqa: ANN401
    """The same values; as text, and as lists with offsets, where Arrow's schema in the file names their other forms.

    Not of a list view: pyarrow 26 loses its last list in a cast.
    """
    if pa.types.is_string_view(column.type):
        return column.cast(pa.large_string())
    return column.cast(pa.list_(column.type.value_type)) if pa.types.is_fixed_size_list(column.type) else column


def _integers(table: Any, name: str) -> Ints:  # noqa: ANN401
    values: Ints = _column(table, name, pa.types.is_integer, "whole numbers").to_numpy(zero_copy_only=False)
    return values.astype(np.int64)


def _chains(table: Any, name: str) -> tuple[Ints, Names]:  # noqa: ANN401
    """Offsets, and ids as in the file, of a column of lists of integers."""
    column = _column(table, name, _is_chain, "lists of integers")
    offsets = np.concatenate([[0], np.cumsum(np.diff(column.offsets.to_numpy()))]).astype(np.int64)
    flat = column.flatten()
    values = flat.to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(flat.is_null().to_numpy(zero_copy_only=False) | ~(values >= 0))
    if wrong.size:
        raise TraceError(f"row {_row(offsets, wrong[0])}, column {name!r}: a block id is missing or negative")
    if not values.size:
        raise TraceError(f"column {name!r}: there is nothing in it: no request has a block")
    return offsets, values


def _row(offsets: Ints, place: int) -> int:
    """The request that an access belongs to."""
    return int(np.searchsorted(offsets, place, side="right")) - 1


def _block_size(table: Any) -> int:  # noqa: ANN401
    text = (table.schema.metadata or {}).get(b"block_size", b"").decode(errors="replace")
    if not text.isdecimal() or len(text) > _MOST_DIGITS or not int(text):
        raise TraceError(f"parquet metadata 'block_size' must be tokens per block, not {text[:40]!r}")
    return int(text)


def _is_number(kind: Any) -> bool:  # noqa: ANN401
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _is_chain(kind: Any) -> bool:  # noqa: ANN401
    return bool((pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type))


def _is_text(kind: Any) -> bool:  # noqa: ANN401
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(value) or pa.types.is_large_string(value))


def _check_requests(trace: Trace) -> None:
    lengths = np.diff(trace.offsets)
    blocks = -(-trace.input_len // trace.block_tokens)
    checks = [
        ("t", ~np.isfinite(trace.t), "is not a time"),
        ("t", np.concatenate([[False], np.diff(trace.t) < 0]), "is earlier than the row before"),
        ("input_len", trace.input_len < 1, "a prompt has at least one token"),
        ("hash_ids", lengths > blocks, "the chain is longer than the prompt (input_len / block_size, rounded up)"),
    ]
    for column, wrong, message in checks:
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise TraceError(f"row {row}, column {column!r}: {message}")


def _check_parents(trace: Trace, names: Names) -> None:
    """TraceError unless each id follows the same block everywhere, as it names its prefix; ``names`` as in the file."""
    parents = np.concatenate([[-1], trace.ids[:-1]])
    starts = trace.offsets[:-1]
    parents[starts[starts < trace.accesses]] = -1
    known = np.full(int(trace.ids.max()) + 1, -1, dtype=np.int64)
    known[trace.ids[::-1]] = parents[::-1]  # the first place of an id is written last
    wrong = np.flatnonzero(known[trace.ids] != parents)
    if not wrong.size:
        return
    place = int(wrong[0])
    first = int(np.flatnonzero(trace.ids == trace.ids[place])[0])
    now, before = (_told(parents[at] >= 0, names[at - 1]) for at in (place, first))
    raise TraceError(
        f"row {_row(trace.offsets, place)}, column 'hash_ids': "
        f"broken chain: block {names[place]} follows {now} here, but {before} before"
    )


def _told(inner: bool, parent: int) -> str:
    return f"block {parent}" if inner else "nothing"
