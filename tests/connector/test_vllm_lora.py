"""Adapters are told apart by their contents, not by their names."""

from dataclasses import dataclass

import pytest

from connector.test_vllm_weights import write_shard
from tiertune_connector.vllm import lora, weights
from tiertune_connector.vllm.lora import AdapterDigests


@dataclass
class Adapter:
    """As vLLM's LoRARequest."""

    lora_path: str
    lora_name: str = "math"
    lora_int_id: int = 1
    load_inplace: bool = False


def write(folder, fill: int, rank: int = 8):
    folder.mkdir(exist_ok=True)
    write_shard(folder / "adapter_model.safetensors", bytes([fill]) * 4000)
    (folder / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    return str(folder)


@pytest.fixture
def adapter(tmp_path):
    """Makes an adapter in a folder of this name, whose contents follow from ``fill``."""
    return lambda name="a", fill=1, **fields: Adapter(write(tmp_path / name, fill), **fields)


def contents(path: str, **fields) -> bytes | None:
    """As an engine tells it that has just started."""
    return AdapterDigests().contents(Adapter(path, **fields))


def test_equal_contents_share_and_others_do_not(tmp_path):
    """Name, id and path do not matter; other weights or another configuration under the same name do."""
    one, other_rank = write(tmp_path / "one", 1), write(tmp_path / "other-rank", 1, rank=16)
    copy, other = write(tmp_path / "copy", 1), write(tmp_path / "other", 2)
    assert contents(one) == contents(copy, lora_name="copy", lora_int_id=7)
    assert len({contents(one), contents(other), contents(other_rank), b""}) == 4
    assert len(contents(one)) == 16


def test_keys_3_of_an_adapter_are_these(adapter):
    """Engines of other versions have them too: with anything else here, `vllm/identity.py` raises ``KEYS``.

    One that applies it otherwise, only to some modules or in another type, has others.
    """
    told = [AdapterDigests(settings).contents(adapter()).hex() for settings in ("", '[["q_proj"]]')]
    assert told == ["f60d9bb2e3465bcd04e8ba2d0dc210e1", "198d5f4589cab6e891e27464e958b7e4"]


def test_no_adapter_adds_nothing():
    """Keys without an adapter are vLLM's own."""
    assert AdapterDigests().contents(None) == b""


def test_the_files_are_read_once(adapter, monkeypatch):
    """Later requests cost stat calls alone: the digest is on the scheduler's thread."""
    digests, used = AdapterDigests(), adapter()
    first = digests.contents(used)
    monkeypatch.setattr(weights, "digest_of", None)
    assert digests.contents(used) == first


def test_an_adapter_that_changes_while_it_is_read_is_not_known(adapter, monkeypatch):
    """Somebody writes into its folder: the request is served, and the engine lives on."""
    digests, used, read = AdapterDigests(), adapter(), weights.digest_of

    def slowly(*files):
        found = read(*files)
        adapter(fill=2)
        return found

    monkeypatch.setattr(weights, "digest_of", slowly)
    assert [digests.contents(used), digests.contents(used)] == [None, None]
    assert not digests.stands(used, None)


@pytest.mark.parametrize(
    "path",
    ["x" * 300, "~nobody-of-that-name/a", "a\0b", "~a\0b/a"],
    ids=["long", "nobody's", "zero byte", "zero byte in a user's name"],
)
def test_an_adapter_whose_folder_cannot_be_asked_is_not_known(path):
    """Its name is too long, or its file server gives an error: the engine says so to whoever asked, and lives on."""
    assert contents(path) is None


@pytest.mark.parametrize("again", [{}, {"lora_int_id": 2}, {"load_inplace": True}], ids=["no", "other id", "in place"])
def test_an_adapter_that_changed_is_not_known_any_more(adapter, caplog, again):
    """Under its id: which contents the engine has is unknown then, for good.

    Loaded anew, under a new id or in place: the engine's own caches mix both, so what it has is nobody's.
    """
    digests = AdapterDigests()
    assert digests.contents(adapter()) is not None
    changed = adapter(fill=2, **again)
    seen = [digests.contents(changed), digests.contents(changed), digests.contents(adapter(**again))]
    assert [*seen, digests.contents(adapter(lora_int_id=3))] == [None] * 4
    assert caplog.text.count("its files changed") == 1


@pytest.mark.parametrize("moved", ["changed", "elsewhere"])
def test_a_request_that_saw_its_adapter_replaced_stands_for_neither(adapter, moved):
    """Loaded in place, from changed files or from another folder, amid a request: the rest is of the new weights."""
    digests, old = AdapterDigests(), adapter()
    told = digests.contents(old)
    assert digests.stands(old, told)
    if moved == "changed":
        adapter(fill=2)
    else:
        assert digests.contents(adapter("b", 2, load_inplace=True)) is None
    assert not digests.stands(old, told)


def test_what_could_not_be_loaded_leaves_its_name_and_folder_and_spoils_its_id(adapter):
    """An operator mends files and tries again, under another id: a server gives every try one.

    vLLM keeps an adapter that does not fit the model, and serves it for the next one that gets its id: when a resolver
    of names fails it tries another one so.
    """
    digests, bad, good = AdapterDigests(), adapter(), adapter("b", 2)
    with pytest.raises(OSError), digests.loading(bad):
        raise OSError
    mended, other = adapter(fill=3, lora_int_id=2), adapter("c", 2, lora_int_id=3)
    assert digests.contents(mended) == contents(mended.lora_path)
    assert digests.contents(other) == contents(other.lora_path)
    with digests.loading(good):
        pass
    assert digests.contents(good) is None
    with pytest.raises(OSError), digests.loading(adapter("d", lora_int_id=3)):
        raise OSError
    assert digests.contents(other) is None


def test_what_was_loaded_and_never_requested_spoils_no_name(adapter):
    """The engine computed nothing with it: an operator unloads it, mends the files and loads them under another id."""
    digests = AdapterDigests()
    with digests.loading(adapter()):
        pass
    mended = adapter(fill=2, lora_int_id=2)
    with digests.loading(mended):
        pass
    assert digests.contents(mended) == contents(mended.lora_path)


@pytest.mark.parametrize("inplace", [True, False])
def test_another_folder_under_a_loaded_id_is_not_known(adapter, inplace):
    """The engine may have either, and has mixed the old one's chunks with the new one's; a new id of a new name is."""
    digests = AdapterDigests()
    digests.contents(adapter())
    assert digests.contents(adapter("b", 2, load_inplace=inplace)) is None
    assert [digests.contents(adapter(fill=1)), digests.contents(adapter(lora_int_id=3))] == [None] * 2
    other = adapter("b", 2, lora_name="new", lora_int_id=2)
    assert digests.contents(other) == contents(other.lora_path)


def test_what_was_loaded_in_place_is_not_known(adapter):
    """Nobody knows when: neither it, nor what lies in its folder later."""
    digests = AdapterDigests()
    inplace, plain = adapter(load_inplace=True), adapter()
    assert [digests.contents(each) for each in (inplace, plain, adapter(lora_int_id=2))] == [None] * 3
    assert not digests.stands(plain, contents(plain.lora_path))
    assert not digests.stands(plain, None)


def test_an_adapter_is_known_as_it_was_told(adapter):
    """An engine in its caller's process gets the caller's own object, who may use it for another folder."""
    digests, used = AdapterDigests(), adapter()
    told = digests.contents(used)
    used.lora_path = adapter("b", 2).lora_path
    assert digests.contents(used) != told
    assert not digests.stands(used, told)


@pytest.mark.parametrize("field", ["lora_path", "lora_name", "lora_int_id"])
def test_a_request_whose_adapter_became_an_unknown_one_stands_for_none(adapter, field):
    """Its caller, in the engine's process, renamed it amid the request: the rest is of nobody knows what."""
    digests, used = AdapterDigests(), adapter()
    told = digests.contents(used)
    setattr(used, field, {"lora_path": adapter("b").lora_path, "lora_name": "other", "lora_int_id": 2}[field])
    assert not digests.stands(used, told)


def test_what_has_no_adapter_stands():
    """Nothing of it can be exchanged."""
    assert AdapterDigests().stands(None, b"")


def test_an_adapter_loaded_from_another_folder_is_told_by_its_contents(adapter):
    """The engine's own keys hold the folder, so that nothing is mixed."""
    digests = AdapterDigests()
    digests.contents(adapter())
    other = adapter("b", 2, lora_int_id=2)
    assert digests.contents(other) == contents(other.lora_path)


def test_an_adapter_loaded_again_unchanged_is_known_as_before(adapter):
    """Under a new id."""
    digests, again = AdapterDigests(), [adapter(), adapter(lora_int_id=2)]
    assert {digests.contents(each) for each in again} == {contents(again[0].lora_path)}


@pytest.mark.parametrize("spoil", ["no such folder", "no safetensors", "unreadable"])
def test_without_safetensors_contents_are_unknown(tmp_path, caplog, spoil):
    """Said once; and what comes into its folder later is not known either, as the engine's caches mix both."""
    path = write(tmp_path / "a", 1)
    shard = tmp_path / "a" / "adapter_model.safetensors"
    if spoil == "no such folder":
        path = "someone/adapter"
    elif spoil == "no safetensors":
        shard.rename(shard.with_suffix(".bin"))
        write_shard(tmp_path / "a" / "new_embeddings.safetensors", b"beside others")
    else:
        shard.unlink()
        shard.mkdir()
    digests = AdapterDigests()
    assert [digests.contents(Adapter(path)) for _ in range(2)] == [None] * 2
    assert len([record for record in caplog.records if "not known" in record.message]) == 1
    if spoil == "no safetensors":
        write(tmp_path / "a", 1)
        assert digests.contents(Adapter(path, lora_int_id=2)) is None


def test_no_more_adapters_are_remembered_than_memory_is_meant_for(adapter, monkeypatch, caplog):
    """Later ones are unknown, and those before as known as ever."""
    monkeypatch.setattr(lora, "MOST", 2)
    digests, each = AdapterDigests(), [adapter(f"a{place}", place, lora_int_id=place) for place in range(4)]
    assert [digests.contents(one) is not None for one in each] == [True, True, False, False]
    assert digests.contents(each[0]) == contents(each[0].lora_path)
    assert len(digests._known) == len(digests._served) == 2
    assert caplog.text.count("are not shared") == 1
