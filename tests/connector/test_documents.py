"""YAML documents: every problem has its place, and nothing but DocumentError comes out."""

import os
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from tiertune_connector.documents import Document, DocumentError, load_yaml, parse_yaml, where
from tiertune_connector.units import Duration, Size


class Inner(Document):
    size: Size = 0
    names: list[str] = Field(default_factory=list)


class Other(Document):
    start: int = Field(default=0, alias="from")


class Outer(Document):
    inner: Inner
    count: int = 1
    flops: float = 0.0
    by_name: dict[str, float] = Field(default_factory=dict)
    listed: list[Inner] = Field(default_factory=list)
    named: dict[str, Other] | None = None


def problems(text: str) -> list[str]:
    with pytest.raises(DocumentError) as raised:
        parse_yaml(text, Outer, name="f.yaml")
    return raised.value.problems


def test_a_few_lines_do_not_stand_for_more_than_memory_holds(monkeypatch):
    """Each names the one before ten times: what would take for ever is told at once; a value that is shared is fine."""
    assert parse_yaml("inner: {names: [&a x, *a]}", Outer, name="f.yaml").inner.names == ["x", "x"]
    monkeypatch.setattr(yaml, "load", lambda *_, **__: pytest.fail("merges would be copied"))
    for first, more, last in (("[x]", "[", "]"), ("{x: y}", "{<<: [", "]}")):
        lines = (f"a{n}: &a{n} {more}{', '.join([f'*a{n - 1}'] * 10)}{last}" for n in range(1, 7))
        told = problems("\n".join([f"a0: &a0 {first}", *lines]))
        assert told == ["f.yaml:1:1: with what its aliases stand for it has more than 1000000 values"]


def checked(text: str) -> list[str]:
    """The problems of a text, if it has any."""
    try:
        parse_yaml(text, Outer, name="f")
    except DocumentError as error:
        return error.problems
    return []


def test_a_good_document():
    """Units are understood, defaults are filled in."""
    assert parse_yaml("inner: {size: 8KiB, names: [a]}\n", Outer, name="f") == Outer(
        inner=Inner(size=8192, names=["a"])
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "f.yaml:1:1: the file is empty"),
        ("# nothing\n", "f.yaml:1:1: the file is empty"),
        ("inner: {}\ncuont: 2\n", "f.yaml:2:1: cuont: unknown key: did you mean count?"),
        ("inner:\n  size: 1\n  sise: 2\n", "f.yaml:3:3: inner.sise: unknown key: did you mean size?"),
        ("count: 2\n", "f.yaml:1:1: inner: Field required"),
        ("inner: {}\ncount: x\n", "f.yaml:2:8: count: Input should be a valid integer"),
        ("inner:\n  names:\n    - a\n    - {b: 1}\n", "f.yaml:4:7: inner.names.1: Input should be a valid string"),
        ("inner:\n  size: 3 GB\n", "f.yaml:2:9: inner.size: '3 GB' is not understood"),
        ("inner: {}\ninner: {}\n", "f.yaml:2:1: inner: the key stands here a second time"),
        ("inner:\n  size: 1\n  size: 2\n", "f.yaml:3:3: size: the key stands here a second time"),
        ("inner: {\n", "f.yaml:2:1: not YAML"),
        ("inner: [1\ncount: 2", "f.yaml:2:6: not YAML"),
        ("\tinner: {}\n", "f.yaml:1:1: not YAML"),
        ("inner: {}\ncount: !!python/object:os.system x\n", "f.yaml:2:8: not YAML"),
        ("{[1]: 2}\n", "f.yaml:1:2: not YAML"),
        ("inner: 2024-13-45\n", "f.yaml:1:8: not YAML: '2024-13-45' is no timestamp"),
        ("inner: !!int x\n", "f.yaml:1:8: not YAML: 'x' is no int"),
        ("inner: !!int ''\n", "f.yaml:1:8: not YAML: '' is no int"),
        ("inner: !!float _\n", "f.yaml:1:8: not YAML: '_' is no float"),
        ("inner: !!bool x\n", "f.yaml:1:8: not YAML: 'x' is no bool"),
        ("inner: !!timestamp x\n", "f.yaml:1:8: not YAML: 'x' is no timestamp"),
        (f"inner: {'1:00' + ':00' * 200}.0\n", "f.yaml:1:8: not YAML: '1:00:00:00"),
        (f"inner: {'1' + ':1' * 2_000_000}\n", "f.yaml:1:8: not YAML: more than 1000 characters are no int"),
        (f"inner: {'[' * 200_000}\n", "f.yaml:1:107: not YAML: nested too deeply"),
        (f"inner: {'[' * 150}{']' * 150}\n", "f.yaml:1:107: not YAML: nested too deeply"),
        ("inner: !!map x\n", "f.yaml:1:8: not YAML: expected a mapping node"),
        ("inner: !!timestamp {=: a}\n", "f.yaml:1:8: not YAML: expected a scalar node"),
        (f"inner: !!int {{=: 0x{'f' * 6000}}}\n", "f.yaml:1:8: not YAML: expected a scalar node"),
        ("inner: {}\ncount: 1e400\n", "f.yaml:2:8: count: Input should be a"),
        ("a\0b", "f.yaml:1:2: not YAML: control characters"),
        ('inner: {names: ["a\\0b"]}\n', "f.yaml:1:17: not YAML: the character \\0 has no place here"),
        ('inner: {}\n"\\0": 1\n', "f.yaml:2:1: not YAML: the character \\0 has no place here"),
        ("# é\nb: é\1", "f.yaml:2:5: not YAML: control characters"),
        ("&a [*a]\n", "f.yaml:1:1: nested too deeply"),
        ("- 1\n", "f.yaml:1:1: Input should be keys with values"),
        ("inner: {size: .inf}\n", "f.yaml:1:15: inner.size: expected a finite number"),
        ("1: 2\ninner: {}\n", "f.yaml:1:1: 1: unknown key"),
        ("inner: {}\ncount: yes\n", "f.yaml:2:8: count: Input should be a valid integer"),
        ("inner: {}\ncount: '2'\n", "f.yaml:2:8: count: Input should be a valid integer"),
        ("inner: {names: [2]}\n", "f.yaml:1:17: inner.names.0: Input should be a valid string"),
        ("inner: {names: a}\n", "f.yaml:1:16: inner.names: Input should be a list"),
        ("inner: 2\n", "f.yaml:1:8: inner: Input should be keys with values"),
        ("inner: {}\nby_name: 2\n", "f.yaml:2:10: by_name: Input should be keys with values"),
        ("inner: {names: !!set {a}}\n", "f.yaml:1:1: expected text, numbers, lists and keys with values, not a set"),
        (f"inner: {{}}\ncount: 0x{'f' * 6000}\n", "f.yaml:2:8: not YAML: more than 1000 characters are no int"),
        ("inner: {}\n? 2025-01-01\n: 1\n", "f.yaml:2:3: 2025-01-01: unknown key"),
        ("inner: {}\non: 1\n", "f.yaml:2:1: on: unknown key"),
    ],
)  # fmt: skip
def test_every_problem_has_its_place(text, problem):
    """File, line and column, and the field."""
    found = problems(text)
    assert any(line.startswith(problem) for line in found), found


@pytest.mark.parametrize(
    ("text", "number"),
    [("989e12", 989e12), ("70.6e9", 70.6e9), ("1E-3", 1e-3), ("-2.e+2", -200.0), ("1_0e2", 1e3), ("9.89e+14", 989e12)],
)
def test_a_number_needs_no_point_and_no_sign_before_its_exponent(text, number):
    """As in YAML 1.2, and as people write FLOPs; where it is quoted, or a key, it is text."""
    parsed = parse_yaml(f"inner: {{names: ['{text}']}}\nflops: {text}\nby_name: {{{text}: 1}}\n", Outer, name="f")
    assert (parsed.flops, parsed.inner.names, list(parsed.by_name)) == (number, [text], [text])


def test_a_key_that_is_an_alias_leaves_the_value_a_number():
    """A key is text; what it stands for elsewhere is what it was."""
    parsed = parse_yaml("inner: {}\ncount: &n 5\nby_name: {*n : 1}\n", Outer, name="f")
    assert (parsed.count, parsed.by_name) == (5, {"5": 1.0})


@pytest.mark.parametrize("text", ["e12", "1e", "1e5x", "1.2.3e4", "0xe5g"])
def test_what_only_looks_like_an_exponent_is_text(text):
    """Names and digests are not taken for numbers."""
    assert parse_yaml(f"inner: {{names: [{text}]}}\n", Outer, name="f").inner.names == [text]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("inner: {cuont: 1}", "f.yaml:1:9: inner.cuont: unknown key"),
        ("inner: {}\nnames: 1", "f.yaml:2:1: names: unknown key: did you mean named?"),
        ("inner: {}\nfrom: 1", "f.yaml:2:1: from: unknown key"),
        ("inner: {}\nlisted: [{}, {sise: 1}]", "f.yaml:2:15: listed.1.sise: unknown key: did you mean size?"),
        ("inner: {}\nnamed: {a: {form: 2}}", "f.yaml:2:13: named.a.form: unknown key: did you mean from?"),
    ],
)
def test_only_a_key_of_the_place_is_proposed(text, problem):
    """As it is written there: one that is right elsewhere would be the next error."""
    assert problems(text)[0] == problem


def test_all_problems_are_told_at_once():
    """One run of the check is enough, and they come in the file's order."""
    places = [told.split(": ")[0] for told in problems("innner: {}\ncount: x\n")]
    assert places == ["f.yaml:1:1", "f.yaml:1:1", "f.yaml:2:8"]


def test_a_list_is_not_too_short_for_what_is_wrong_in_it():
    """Its entry is told alone; an empty list is told as one."""

    class Days(Document):
        days: tuple[Literal["mon", "tue"], ...] = Field(min_length=1)

    for text, problem in (("days: [friday]", "f:1:8: days.0: "), ("days: []", "f:1:7: days: name at least 1")):
        with pytest.raises(DocumentError) as told:
            parse_yaml(text, Days, name="f")
        assert [line[: len(problem)] for line in told.value.problems] == [problem]


def test_an_error_of_a_path_is_told_without_its_number(tmp_path):
    """What names no path is told as it is."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Errno") as there:
        (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="Errno") as beneath:
        (tmp_path / "file" / "folder").mkdir()
    assert where(there.value) == f"{tmp_path}/file: is there, and is no directory"
    assert where(beneath.value) == f"{tmp_path}/file/folder: Not a directory"
    assert where(OSError("the port is taken")) == "the port is taken"


@given(st.text(max_size=200))
def test_any_text_is_a_document_or_a_document_error(text):
    """No other exception, whatever stands in the file; every problem has a place in it."""
    assert all(problem.startswith("f:") for problem in checked(text))


@settings(max_examples=40)
@given(st.recursive(st.none() | st.text(max_size=3), lambda c: st.lists(c) | st.dictionaries(st.text(max_size=3), c)))
def test_any_structure_is_a_document_or_a_document_error(data):
    """Also what is YAML, but not ours."""
    assert all(problem.startswith("f:") for problem in checked(yaml.safe_dump(data)))


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    """Missing, a directory, or not text."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    for name, reason in (("none", "No such file"), (".", "directory"), ("binary", "not UTF-8")):
        with pytest.raises(DocumentError, match=f"cannot be read: .*{reason}"):
            load_yaml(tmp_path / name, Outer)


def test_a_byte_that_is_no_text_has_its_place(tmp_path):
    """Whatever ends its lines, and whatever an editor wrote before them."""
    file = tmp_path / "f.yaml"
    for written, place in (
        (b"count: 1\n# \xc3\xa9t\xe9\n", "2:5"),
        (b"\xef\xbb\xbf# \xe9", "1:3"),
        (b"a: 1\r\nb: 2\rc: \xff", "3:4"),
        ("count: 1".encode("utf-16"), "1:1"),
    ):
        file.write_bytes(written)
        with pytest.raises(DocumentError, match=f"^{file}:{place}: cannot be read: is not UTF-8 text$"):
            load_yaml(file, Outer)


def test_a_pipe_or_a_device_is_no_file_and_what_was_handed_over_is_read(tmp_path):
    """Who reads a pipe that nobody writes to waits for ever; a shell's ``<(...)`` has somebody who writes."""
    os.mkfifo(tmp_path / "pipe")
    for path in (Path(os.devnull), tmp_path / "pipe"):
        with pytest.raises(DocumentError, match=f"{path}: cannot be read: it is no regular file"):
            load_yaml(path, Outer)
    receiver, sender = os.pipe()
    os.write(sender, b"inner: {size: 8KiB}")
    os.close(sender)
    assert load_yaml(f"/dev/fd/{receiver}", Outer).inner.size == 8192
    os.close(receiver)


def test_a_bound_has_the_unit_that_was_written():
    """21600 alone would be read as hours by who wrote 5h; a plain number has no unit."""

    class Kept(Document):
        keep: Duration = Field(default=21600.0, ge=21600)
        slab: Size = Field(default=8192, ge=8192)

    for text, told in (("keep: 5h", "21600 seconds"), ("keep: 5", "21600"), ("slab: 5000B", "8192 bytes")):
        with pytest.raises(DocumentError) as raised:
            parse_yaml(text, Kept, name="f")
        assert raised.value.problems[0].endswith(f"greater than or equal to {told}")
