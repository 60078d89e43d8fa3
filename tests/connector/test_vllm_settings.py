"""What an operator writes for an engine, and what tells its weights."""

import json
import struct

import pytest

from tiertune_connector.vllm import weights
from tiertune_connector.vllm.settings import for_vllm, parse

EXTRA = {"socket": "/run/tiertune/store.sock", "staging": "64MiB", "chunk_tokens": 256}


def test_vllm_gets_its_own_keys_from_ours():
    """Sizes become bytes, generated tokens are stored too, and one tier stands behind staging."""
    made = for_vllm(EXTRA, {"shape": 1})
    assert made["cpu_bytes_to_use"] == 64 << 20
    assert made["block_size"] == 256
    assert made["offload_prompt_only"] is False
    (tier,) = made["secondary_tiers"]
    assert tier["type"] == "TierTuneTier"
    assert tier["shape"] == 1


def test_translating_twice_changes_nothing():
    """Worker, scheduler and API server may each translate the same configuration."""
    assert for_vllm(for_vllm(EXTRA, {}), {}) == for_vllm(EXTRA, {})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({**EXTRA, "sockett": "x"}, "kv_connector_extra_config.sockett: unknown key"),
        ({"socket": "x"}, "kv_connector_extra_config.staging: Field required"),
        ({**EXTRA, "staging": "64MB"}, "kv_connector_extra_config.staging: '64MB' is not understood"),
    ],
)
def test_a_wrong_key_is_named(extra, message):
    """An operator reads which key to mend."""
    with pytest.raises(ValueError, match=r"kv_connector_extra_config\.") as error:
        parse(extra)
    assert message in str(error.value)


def write_shard(path, payload: bytes, dtype: str = "F32"):
    header = json.dumps({"w": {"dtype": dtype, "shape": [len(payload) // 4], "data_offsets": [0, len(payload)]}})
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + payload)


def test_the_weights_digest_tells_other_weights_apart(tmp_path):
    """Equal files give equal digests wherever they lie; another head, tail, header, size or config gives another."""
    payload = bytes(300_000)
    changed = {
        "same": payload,
        "head": b"\1" + payload[1:],
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


def test_a_folder_without_shards_tells_nothing(tmp_path):
    """Weights that cannot be told are not mistaken for others."""
    assert weights.digest(tmp_path) == ""
