"""What an operator writes for an engine, and what vLLM is told in turn."""

import json
import re
from pathlib import Path

import pytest

from tiertune_connector.serve import embedded
from tiertune_connector.vllm.settings import EngineSettings, for_vllm, parse
from tiertune_connector.vllm.sizes import plan

EXTRA = {"socket": "/run/tiertune/store.sock", "staging": "64MiB", "chunk_tokens": 256}
PLAN = plan((16,), 65536, batched_tokens=2048, prompt_tokens=4096, chunk_tokens=256)


def test_vllm_gets_its_own_keys_from_ours():
    """Sizes become bytes and blocks, generated tokens are stored too, and one tier stands behind staging."""
    made = for_vllm(EXTRA, PLAN)
    assert made["cpu_bytes_to_use"] == 64 << 20
    assert made["blocks_per_chunk"] == 256 // 16
    assert made["offload_prompt_only"] is False
    (tier,) = made["secondary_tiers"]
    assert tier["type"] == "TierTuneTier"
    assert tier["settings"] == parse(EXTRA)


def test_staging_that_is_left_out_comes_from_the_plan():
    """The formula decides where the operator does not."""
    made = for_vllm({"socket": "x"}, PLAN)
    assert made["cpu_bytes_to_use"] == PLAN.staging_bytes


def test_translating_twice_changes_nothing():
    """Worker, scheduler and API server may each translate the same configuration, the last without a plan."""
    once = for_vllm(EXTRA, PLAN)
    assert for_vllm(once, PLAN) == once
    assert for_vllm(once, None) == once


def test_vllms_own_keys_pass_through():
    """Those that do not follow from ours are left as they are."""
    made = for_vllm({**EXTRA, "eviction_policy": "arc", "self_describing_kv_events": True}, PLAN)
    assert made["eviction_policy"] == "arc"
    assert made["self_describing_kv_events"] is True


def test_a_value_that_no_json_has_is_told_by_its_type():
    """Python code starts engines, too."""
    with pytest.raises(ValueError, match=r"kv_connector_extra_config: expected text, .*, not a PosixPath"):
        parse({"socket": Path("/run/store.sock")})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({**EXTRA, "sockett": "x"}, "kv_connector_extra_config.sockett: unknown key: did you mean socket?"),
        ({**EXTRA, "staging": "64MB"}, "kv_connector_extra_config.staging: '64MB' is not understood"),
        ({**EXTRA, "staging": 0}, "kv_connector_extra_config.staging: Input should be greater than 0"),
        ({**EXTRA, "chunk_tokens": 0}, "kv_connector_extra_config.chunk_tokens: Input should be greater than 0"),
        ({**EXTRA, "epoch": -1}, "kv_connector_extra_config.epoch: Input should be greater than or equal to 0"),
        ({**EXTRA, "epoch": 2**63}, "kv_connector_extra_config.epoch: Input should be less than 9223372036854775808"),
        ({**EXTRA, "epoch": "2"}, "kv_connector_extra_config.epoch: Input should be a valid integer"),
        ({**EXTRA, "epoch": True}, "kv_connector_extra_config.epoch: Input should be a valid integer"),
        ({**EXTRA, "isolation": "strict"}, "kv_connector_extra_config.isolation: Input should be 'shared' or"),
        ({**EXTRA, "socket": "x" * 101}, "kv_connector_extra_config.socket: the path of a unix socket has 1 to 100"),
        ({**EXTRA, "otlp_endpoint": "collector:4318"}, "kv_connector_extra_config.otlp_endpoint: String should match"),
        ({**EXTRA, "socket": "/run/a\0b"}, "kv_connector_extra_config.socket: the path of a unix socket has 1 to 100"),
        ({**EXTRA, "otlp_endpoint": "http://[::1"}, "kv_connector_extra_config.otlp_endpoint: write it as http://host"),
        ({**EXTRA, "otlp_endpoint": "http:///v1"}, "kv_connector_extra_config.otlp_endpoint: write it as http://host"),
        ({**EXTRA, "otlp_endpoint": "http://a:b"}, "kv_connector_extra_config.otlp_endpoint: write it as http://host"),
        ({**EXTRA, "cpu_bytes_to_use": 1}, "cpu_bytes_to_use: unknown key: TierTune sets it by itself"),
        ({**EXTRA, "block_size": 1}, "block_size: unknown key: TierTune sets it by itself"),
    ],
)
def test_a_wrong_key_is_named(extra, message):
    """An operator reads which key to mend; also where vLLM's own key would be overwritten."""
    with pytest.raises(ValueError, match=r"kv_connector_extra_config\.") as error:
        parse(extra)
    assert message in str(error.value)


def test_every_key_may_be_left_out(monkeypatch, tmp_path):
    """Then the socket is where this user's embedded store listens, and such a store may be started."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    settings = parse({})
    assert settings.socket == str(tmp_path / "tiertune" / "store.sock")
    assert 0 < settings.store_dram <= embedded.MOST_DRAM_BYTES
    assert settings.staging is None


@pytest.mark.parametrize(("fits", "dram"), [(3, 0.75), (12, 3), (500, 4)])
def test_an_embedded_store_leaves_most_of_a_small_limit(monkeypatch, fits, dram):
    """It lies in the engine's own control group: what counts is its limit, not the host's memory."""
    monkeypatch.setattr(embedded, "most_memory", lambda: fits << 30)
    assert parse({}).store_dram == dram * 2**30


@pytest.mark.parametrize(
    ("extra", "dram"), [({"socket": "x"}, 0), ({"socket": "x", "store_dram": "1GiB"}, 2**30), ({"store_dram": 0}, 0)]
)
def test_who_names_a_socket_runs_the_store(extra, dram):
    """None is started there unless that is said; and `store_dram: 0` says never."""
    assert parse(extra).store_dram == dram


README = (Path(__file__).parents[2] / "connector" / "README.md").read_text()


def test_the_readme_names_every_key():
    """The table has the keys that there are, and no other."""
    assert re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE) == list(EngineSettings.model_fields)


def test_the_readmes_lines_are_understood():
    """Every configuration in it is JSON that an engine would take."""
    found = re.findall(r"--kv-transfer-config '(.+?)'", README, re.DOTALL)
    assert len(found) >= 2
    for transfer in map(json.loads, found):
        assert transfer["kv_connector"] == "TierTuneConnector"
        parse(transfer.get("kv_connector_extra_config", {}))
