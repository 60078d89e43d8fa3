"""Traces are checked before anyone believes them."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pages import ROOT, blocks
from replay.files import CHAINS, columns, write_trace
from tiertune_agent.replay.traces import BUILTIN, TraceError, builtin_trace, load_trace, open_trace


@pytest.fixture
def written(tmp_path):
    """Writes a trace; returns its path."""
    return lambda *given: write_trace(tmp_path / "x.parquet", *given)


def refused(path):
    with pytest.raises(TraceError) as error:
        load_trace(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def test_a_good_trace_is_loaded_whole(written):
    """Chains, times and counts come out as they were written."""
    trace = load_trace(written(columns()))
    assert (trace.name, trace.block_tokens, len(trace), trace.accesses, trace.unique) == ("x", 16, 3, 7, 5)
    assert trace.chains == CHAINS
    assert trace.t.tolist() == [0.0, 1.0, 2.0]
    assert trace.type == ["chat"] * 3


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("type", pa.large_string()),
        ("type", pa.string_view()),
        ("type", pa.dictionary(pa.uint8(), pa.large_string())),
        ("session", pa.uint64()),
        ("hash_ids", pa.large_list(pa.int64())),
        ("hash_ids", pa.list_(pa.int32(), 2)),
    ],
    ids=str,
)
def test_a_column_may_have_any_encoding_of_its_values(written, column, kind):
    """Other libraries write text, numbers and lists otherwise; in a file all are parquet's own."""
    table = columns([[0, 1], [0, 2], [3, 4]])
    plain = load_trace(written(table))
    loaded = load_trace(written(table | {column: pa.array(table[column].to_pylist(), kind)}))
    assert loaded.chains == plain.chains
    assert (loaded.type, loaded.session.tolist()) == (plain.type, plain.session.tolist())


@pytest.mark.parametrize("name", BUILTIN)
def test_shipped_traces_load_by_name(name):
    """What the demo and the examples use is there, valid, and repeats blocks."""
    trace = builtin_trace(name)
    assert len(trace) > 1000
    assert trace.unique < trace.accesses / 3
    assert open_trace(name).unique == trace.unique


def test_a_folder_of_its_name_hides_no_shipped_trace(tmp_path, monkeypatch):
    """Wherever the command runs; a file of that name is taken."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / BUILTIN[0]).mkdir()
    assert open_trace(BUILTIN[0]).name == BUILTIN[0]
    (tmp_path / BUILTIN[1]).write_bytes(b"")
    with pytest.raises(TraceError, match="cannot be read as parquet"):
        open_trace(BUILTIN[1])


def test_the_shipped_slice_repeats_across_engines():
    """Of the slice's blocks, far more were seen before by some engine than by the engine that asks."""
    trace = builtin_trace("shift_mix_slice")
    placed = np.random.default_rng(0).integers(0, 4, len(trace)).tolist()
    anywhere, own = set(), [set() for _ in range(4)]
    shared = local = 0
    for chain, engine in zip(trace.chains, placed, strict=True):
        shared += sum(block in anywhere for block in chain)
        local += sum(block in own[engine] for block in chain)
        anywhere.update(chain)
        own[engine].update(chain)
    assert shared > 1.25 * local


def test_attribution_ships_with_the_data():
    """Source and licence of every shipped trace are in its metadata."""
    import pyarrow.parquet as pq

    from tiertune_agent import replay

    for name in BUILTIN:
        metadata = pq.read_schema(f"{replay.__path__[0]}/data/{name}.parquet").metadata
        assert metadata[b"source"]
        assert metadata[b"license"]


@pytest.mark.parametrize("name", list(columns()))
def test_a_missing_column_is_named(written, name):
    """The message says which column is not there."""
    table = columns()
    del table[name]
    assert refused(written(table)).startswith(f"column '{name}' is missing")


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("t", ["a", "b", "c"], "column 't' has type string, expected numbers"),
        ("input_len", [1.5, 2.5, 3.5], "column 'input_len' has type double, expected whole numbers"),
        ("hash_ids", [1, 2, 3], "column 'hash_ids' has type int64, expected lists of integers"),
        ("type", [1, 2, 3], "column 'type' has type int64, expected text"),
        ("t", [0.0, 2.0, 1.0], "row 2, column 't': is earlier than the row before"),
        ("t", [0.0, float("nan"), 1.0], "row 1, column 't': is not a time"),
        ("session", [0, None, 2], "row 1, column 'session': a value is missing"),
        ("input_len", [49, 0, 17], "row 1, column 'input_len': a prompt has at least one token"),
        ("hash_ids", [[0, 1, 2], None, [4]], "row 1, column 'hash_ids': a value is missing"),
        ("hash_ids", [[0], [], [1, None]], "row 2, column 'hash_ids': a block id is missing or negative"),
        ("hash_ids", [[0], [-3], [1]], "row 1, column 'hash_ids': a block id is missing or negative"),
        ("hash_ids", [[0, 1, 2, 3, 4], [0], [5]], "row 0, column 'hash_ids': the chain is longer than the prompt"),
        ("hash_ids", pa.array([[], [], []], pa.list_(pa.int32())), "column 'hash_ids': there is nothing in it"),
    ],
)
def test_a_wrong_value_is_named_with_its_row(written, name, values, expected):
    """The message says row and column, and what is wrong."""
    table = columns() | {name: values if isinstance(values, pa.Array) else pa.array(values)}
    assert refused(written(table)).startswith(expected)


@pytest.mark.parametrize(
    ("chains", "expected"),
    [
        ([[0, 1, 2], [0, 2, 1], [4]], "row 1: block 2 follows block 0 here, but block 1 before"),
        ([[0, 1, 2], [1, 2, 3], [4]], "row 1: block 1 follows nothing here, but block 0 before"),
        ([[0, 1, 2], [3], [3, 0]], "row 2: block 0 follows block 3 here, but nothing before"),
        ([[70, 80, 90], [70, 80], [90]], "row 2: block 90 follows nothing here, but block 80 before"),
        ([[0, 0], [1], [2]], "row 0: block 0 follows block 0 here, but nothing before"),
    ],
)
def test_a_broken_chain_is_named_with_its_row(written, chains, expected):
    """An id whose parent changes does not name a prefix."""
    message = refused(written(columns(chains)))
    assert message.replace(", column 'hash_ids': broken chain", "") == expected


@pytest.mark.parametrize("shift", [0, 2**31, 2**63, 2**64 - 5])
def test_ids_may_take_all_of_64_bits(written, shift):
    """Unsigned hashes are told apart, also where most of them are small, and told as they are in the file."""
    chains = [[shift, shift + 1, 2], [shift, shift + 1, 3], [4]]
    table = columns(chains=[[0]] * 3) | {"input_len": pa.array([48] * 3)}
    trace = load_trace(written(table | {"hash_ids": pa.array(chains, pa.list_(pa.uint64()))}))
    assert [len(chain) for chain in trace.chains] == [3, 3, 1]
    assert (trace.unique, trace.chains[0][:2]) == (5, trace.chains[1][:2])
    broken = pa.array([[shift + 1], [shift, shift + 1], [4]], pa.list_(pa.uint64()))
    message = refused(written(table | {"hash_ids": broken}))
    assert f"block {shift + 1} follows block {shift} here" in message


def test_a_trace_with_nothing_in_it_is_refused(written):
    """No rows, no trace."""
    assert refused(written(columns([]))) == "there is nothing in it: no requests"


@pytest.mark.parametrize("size", [b"", b"0", b"big", b"9" * 5000])
def test_the_block_size_is_required(written, size):
    """Without tokens per block no prefix has a length."""
    assert "'block_size' must be tokens per block" in refused(written(columns(), size))


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    """Text under a parquet name, an absent file and a folder are told apart from a trace."""
    (tmp_path / "x.parquet").write_text("no parquet\n")
    assert refused(tmp_path / "x.parquet").startswith("cannot be read as parquet: ")
    assert refused(tmp_path / "absent.parquet").startswith("there is no such file")
    assert refused(tmp_path) == "is a directory: name a file in it"


def test_text_that_is_no_utf_8_is_refused(written):
    """As another program, or damage, may leave it."""
    table = columns() | {"type": pa.array([b"r\xe4t"] * 3, pa.binary()).view(pa.string())}
    assert refused(written(table)).startswith("cannot be read as parquet: 'utf-8' codec can't decode byte 0xe4")


def test_dictionary_codes_without_an_entry_are_refused(written):
    """Damage that parquet's own checks do not find."""
    table = columns() | {"type": pa.DictionaryArray.from_arrays(pa.array([0, 7, 0]), ["chat"], safe=False)}
    assert refused(written(table)).startswith("cannot be read as parquet: ")


@given(
    paths=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=20),
    stride=st.integers(1, 1000),
)
def test_any_tree_of_prefixes_is_accepted(tmp_path_factory, paths, stride):
    """Ids that name prefixes are valid whether or not they are dense; only their identity counts."""
    names: dict[tuple[int, ...], int] = {}
    chains = [
        [stride * names.setdefault(tuple(path[: end + 1]), len(names)) for end in range(len(path))] for path in paths
    ]
    trace = load_trace(write_trace(tmp_path_factory.mktemp("t") / "x.parquet", columns(chains)))
    assert trace.unique == len(names)
    assert [len(chain) for chain in trace.chains] == [len(path) for path in paths]


def test_a_trace_is_made_as_the_page_tells(tmp_path):
    """Two prompts have the same numbers as far as they begin alike, in whole blocks; the order is that of time."""
    (block,) = [block for block in blocks(ROOT / "docs" / "replay.md") if block.kind == "python"]
    written = {}
    exec(block.text, written)
    head, path = list(range(128)), tmp_path / "own.parquet"
    written["write"]([(9.0, [*head, *range(64)]), (5.0, [*head, 7, 8])], path)
    trace = load_trace(path)
    assert (trace.block_tokens, trace.t.tolist(), trace.input_len.tolist()) == (64, [5.0, 9.0], [130, 192])
    first, second = trace.chains
    assert (len(first), len(second), second[:2]) == (2, 3, first)
    assert trace.unique == 3
