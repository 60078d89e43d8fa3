"""Adapters are told apart by their contents, not by their names."""

from dataclasses import dataclass

import pytest

from connector.test_vllm_weights import write_shard
from tiertune_connector.vllm import weights
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


def suffix(path: str, **fields) -> bytes:
    """As an engine tells it that has just started."""
    return AdapterDigests().suffix(Adapter(path, **fields))


def test_equal_contents_share_and_others_do_not(tmp_path):
    """Name, id and path do not matter; other weights or another configuration under the same name do."""
    one, other_rank = write(tmp_path / "one", 1), write(tmp_path / "other-rank", 1, rank=16)
    copy, other = write(tmp_path / "copy", 1), write(tmp_path / "other", 2)
    assert suffix(one) == suffix(copy, lora_name="copy", lora_int_id=7)
    assert len({suffix(one), suffix(other), suffix(other_rank), b""}) == 4
    assert len(suffix(one)) == 16


def test_keys_1_of_an_adapter_are_these(adapter):
    """Engines of other versions have them too: with anything else here, `vllm/identity.py` raises ``KEYS``.

    One that applies it otherwise, only to some modules or in another type, has others.
    """
    told = [AdapterDigests(settings).suffix(adapter()).hex() for settings in ("", '[["q_proj"]]')]
    assert told == ["f60d9bb2e3465bcd04e8ba2d0dc210e1", "198d5f4589cab6e891e27464e958b7e4"]


def test_no_adapter_adds_nothing():
    """Keys without an adapter are vLLM's own."""
    assert AdapterDigests().suffix(None) == b""


def test_the_files_are_read_once(adapter, monkeypatch):
    """Later requests cost stat calls alone: the digest is on the scheduler's thread."""
    digests, used = AdapterDigests(), adapter()
    first = digests.suffix(used)
    monkeypatch.setattr(weights, "digest_of", None)
    assert digests.suffix(used) == first


@pytest.mark.parametrize("again", [{}, {"lora_int_id": 2}, {"load_inplace": True}], ids=["no", "other id", "in place"])
def test_an_adapter_that_changed_is_not_shared_any_more(adapter, caplog, again):
    """Under its id: which contents the engine has is unknown then, so every request is alone, for good.

    Loaded anew, under a new id or in place: the engine's own caches mix both, so what it has is nobody's.
    """
    digests = AdapterDigests()
    before = digests.suffix(adapter(load_inplace=again.get("load_inplace", False)))
    changed = adapter(fill=2, **again)
    seen = [digests.suffix(changed), digests.suffix(changed), digests.suffix(adapter(**again))]
    assert len({before, suffix(adapter("b", 2).lora_path), *seen}) == 5
    assert caplog.text.count("changed, or may have") == 1


@pytest.mark.parametrize("moved", ["changed", "elsewhere"])
def test_a_request_that_saw_its_adapter_replaced_stands_for_neither(adapter, moved):
    """Loaded in place, from changed files or from another folder, amid a request: the rest is of the new weights."""
    digests, old = AdapterDigests(), adapter()
    told = digests.suffix(old)
    assert digests.stands(old, told)
    if moved == "changed":
        adapter(fill=2)
        assert not digests.stands(old, told)
        return
    new = adapter("b", 2, load_inplace=True)
    assert digests.suffix(new) == suffix(new.lora_path)
    assert digests.stands(new, suffix(new.lora_path))
    assert not digests.stands(old, told)


@pytest.mark.parametrize("inplace", [True, False])
def test_another_folder_under_a_loaded_id_is_not_shared(adapter, inplace):
    """If both are loaded in place, a step of both has one of them only; a new id is shared again.

    Not loaded in place, the engine may still have what it loaded under the id before.
    """
    digests = AdapterDigests()
    digests.suffix(adapter(load_inplace=inplace))
    other = adapter("b", 2, load_inplace=inplace)
    told = digests.suffix(other)
    assert not digests.stands(other, told)
    assert told not in (suffix(other.lora_path), digests.suffix(other))
    assert digests.suffix(adapter("b", 2, lora_name="new", lora_int_id=2)) == suffix(other.lora_path)


def test_an_adapter_is_known_as_it_was_told(adapter):
    """An engine in its caller's process gets the caller's own object, who may use it for another folder."""
    digests, used = AdapterDigests(), adapter()
    told = digests.suffix(used)
    used.lora_path = adapter("b", 2).lora_path
    assert digests.suffix(used) != told
    assert not digests.stands(used, told)


@pytest.mark.parametrize("field", ["lora_path", "lora_name", "lora_int_id"])
def test_a_request_whose_adapter_became_an_unknown_one_stands_for_none(adapter, field):
    """Its caller, in the engine's process, renamed it amid the request: the rest is of nobody knows what."""
    digests, used = AdapterDigests(), adapter()
    told = digests.suffix(used)
    setattr(used, field, {"lora_path": adapter("b").lora_path, "lora_name": "other", "lora_int_id": 2}[field])
    assert not digests.stands(used, told)


def test_what_has_no_adapter_or_no_files_to_change_stands():
    """Unknown contents are this engine's own as long as it has them loaded."""
    digests, unknown = AdapterDigests(), Adapter("someone/adapter")
    assert digests.stands(None, b"")
    assert digests.stands(unknown, digests.suffix(unknown))


def test_unknown_contents_that_are_loaded_in_place_are_not_reused(tmp_path):
    """What was loaded under the id before may have had others, though no file tells."""
    digests, adapter = AdapterDigests(), Adapter("someone/adapter")
    told = digests.suffix(adapter)
    again = [digests.suffix(Adapter(adapter.lora_path, load_inplace=True)) for _ in range(2)]
    assert len({told, *again}) == 3
    assert not digests.stands(adapter, told)


@pytest.mark.parametrize("beside", [(), ("new_embeddings.safetensors",)], ids=["alone", "beside others"])
@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_weights_that_are_not_read_are_watched(tmp_path, name, beside):
    """Overwritten in place: vLLM may have dropped them meanwhile, and loads them again under the same id.

    It loads no safetensors but those of an adapter's name.
    """
    for other in beside:
        write_shard(tmp_path / other, b"as before")
    weights = tmp_path / name
    weights.write_bytes(b"old")
    digests, adapter = AdapterDigests(), Adapter(str(tmp_path))
    told = digests.suffix(adapter)
    assert digests.stands(adapter, told)
    weights.write_bytes(b"other")
    assert not digests.stands(adapter, told)
    assert len({told, digests.suffix(adapter), digests.suffix(adapter)}) == 3


def test_an_adapter_loaded_from_another_folder_is_told_by_its_contents(adapter):
    """The engine's own keys hold the folder, so that nothing is mixed."""
    digests = AdapterDigests()
    digests.suffix(adapter())
    other = adapter("b", 2, lora_int_id=2)
    assert digests.suffix(other) == suffix(other.lora_path)


def test_if_adapters_encode_images_another_folder_is_not_shared(adapter, caplog):
    """The engine keeps encoded images by the adapter's name: they may be of the old contents, whichever is asked for.

    The same contents in another folder mix nothing.
    """
    digests, first = AdapterDigests(encoding=True), adapter()
    told = digests.suffix(first)
    assert told == digests.suffix(adapter("copy", lora_int_id=2)) == suffix(first.lora_path)
    other = adapter("b", 2, lora_int_id=3)
    assert digests.suffix(other) not in {suffix(other.lora_path), digests.suffix(other)}
    assert not digests.stands(first, told)
    assert "under another name" in caplog.text
    assert "another folder" not in caplog.text


def test_an_adapter_loaded_again_unchanged_is_shared_as_before(adapter):
    """Under a new id or in place."""
    digests, again = AdapterDigests(), [adapter(), adapter(lora_int_id=2), adapter(load_inplace=True)]
    assert {digests.suffix(each) for each in again} == {suffix(again[0].lora_path)}


@pytest.mark.parametrize("spoil", ["no such folder", "no safetensors", "unreadable"])
def test_unknown_contents_are_one_engines_own(tmp_path, caplog, spoil):
    """The engine reuses its own chunks, shares with no other, and says so once."""
    path = write(tmp_path / "a", 1)
    shard = tmp_path / "a" / "adapter_model.safetensors"
    if spoil == "no such folder":
        path = "someone/adapter"
    elif spoil == "no safetensors":
        shard.rename(shard.with_suffix(".bin"))
    else:
        shard.unlink()
        shard.mkdir()
    digests = AdapterDigests()
    mine = digests.suffix(Adapter(path))
    assert digests.suffix(Adapter(path)) == mine
    assert len([record for record in caplog.records if "not known" in record.message]) == 1
    assert suffix(path) != mine
    assert digests.suffix(Adapter(path, lora_int_id=2)) != mine, "another loading may be of other contents"
