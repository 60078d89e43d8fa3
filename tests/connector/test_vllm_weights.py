"""What tells the weights of a model."""

import json
import os
import struct

from tiertune_connector.vllm import weights


def write_shard(path, payload: bytes, dtype: str = "F32"):
    header = json.dumps({"w": {"dtype": dtype, "shape": [len(payload) // 4], "data_offsets": [0, len(payload)]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + payload)


def test_the_weights_digest_tells_other_weights_apart(tmp_path):
    """Equal files give equal digests wherever they lie; another head, middle, tail, header, size or config: another."""
    payload = bytes(300_000)
    changed = {
        "same": payload,
        "head": b"\1" + payload[1:],
        "middle": payload[:100_000] + bytes(range(1, 101)) * 1_000 + payload[200_000:],
        "tail": payload[:-1] + b"\1",
        "size": payload + bytes(4),
    }
    for name, content in changed.items():
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "model.safetensors", content)
    for name, dtype, config in (("again", "F32", None), ("header", "I32", None), ("config", "F32", "{}")):
        (tmp_path / name).mkdir()
        write_shard(tmp_path / name / "model.safetensors", payload, dtype)
        if config:
            (tmp_path / name / "config.json").write_text(config)
    digests = {folder.name: weights.digest(folder) for folder in tmp_path.iterdir()}
    assert digests.pop("again") == digests["same"]
    assert len(set(digests.values())) == len(digests)


def test_a_configuration_in_mistrals_format_is_part_of_it(tmp_path):
    """A folder may have nothing else, and another rope there turns every key otherwise."""
    digests = set()
    for name, params in (("none", ""), ("short", '{"rope_theta": 1e4}'), ("long", '{"rope_theta": 1e6}')):
        folder = tmp_path / name
        folder.mkdir()
        write_shard(folder / "consolidated.safetensors", bytes(4096))
        if params:
            (folder / "params.json").write_text(params)
        digests.add(weights.digest(folder))
    assert len(digests) == 3


def test_a_folder_without_shards_tells_nothing(tmp_path):
    """Weights that cannot be told are not mistaken for others."""
    assert weights.digest(tmp_path) == ""


def test_what_only_has_the_name_of_a_shard_is_none(tmp_path):
    """vLLM takes the shards that an index names: a folder beside them ended its start, and a pipe would hold it up."""
    write_shard(tmp_path / "model.safetensors", bytes(4096))
    alone = weights.digest(tmp_path)
    (tmp_path / "old.safetensors").mkdir()
    assert weights.digest(tmp_path) == alone
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert weights.digest(tmp_path) == alone


def test_of_a_damaged_shard_no_more_is_read_than_of_others(tmp_path):
    """Its first bytes may say that its header is all of a file that is larger than the host's memory."""
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(b"\xff" * 8)
    os.truncate(shard, 1 << 42)
    assert len(weights.digest(tmp_path)) == 32


def test_names_of_shards_may_be_any_bytes(tmp_path):
    """As file systems have them: an adapter's folder is read on vLLM's scheduler thread."""
    write_shard(tmp_path / "old\udcff.safetensors", bytes(4096))
    assert len(weights.digest(tmp_path)) == 32
