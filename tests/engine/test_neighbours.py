"""What may serve beside TierTune's connector in a `MultiConnector`."""

import pytest
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from engine.conftest import cache_of
from tiertune_connector.vllm.probes import UnsupportedError

PLAIN = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}
OTHER = {
    "kv_connector": "Beside",
    "kv_connector_module_path": "engine.beside",
    "kv_connector_extra_config": {"at_once": False, "fails": 0.0},
}


def started(configured, arrange):
    """The connectors of a worker, made as vLLM makes them; ``arrange`` gets the configuration of TierTune's."""
    config = configured()
    own = {name: getattr(config.kv_transfer_config, name) for name in ("kv_connector", "kv_connector_extra_config")}
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        engine_id="beside",
        kv_connector_extra_config={"connectors": [{"kv_role": "kv_both", **each} for each in arrange(own)]},
    )
    with set_current_vllm_config(config):
        return MultiConnector(config, KVConnectorRole.WORKER, cache_of(config)).sub_connectors


def within(*connectors):
    """In a `MultiConnector` of their own."""
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(connectors)}}


@pytest.mark.parametrize(
    "arrange",
    [
        lambda own: [PLAIN, own],
        lambda own: [own, PLAIN],
        lambda own: [own, within(PLAIN | {"kv_role": "kv_both"})],
        lambda own: [PLAIN, within(own | {"kv_role": "kv_both"})],
        lambda own: [within(*(each | {"kv_role": "kv_both"} for each in (own, PLAIN)))],
    ],
    ids=["first", "second", "within another", "beside another", "both within another"],
)
def test_vllms_own_offloading_is_refused_wherever_it_stands(configured, arrange):
    """Also in a `MultiConnector` in another.

    The API server ended with Prometheus' message of duplicates; without metrics, nothing was said.
    """
    with pytest.raises(UnsupportedError, match="leave one of them out"):
        started(configured, arrange)


def test_a_second_one_of_tiertune_is_refused_by_its_name(configured):
    """Not as vLLM's, of which there is none."""
    with pytest.raises(UnsupportedError, match="with TierTuneConnector and TierTuneConnector:"):
        started(configured, lambda own: [own, own])


def test_other_connectors_may_be_there(configured):
    """As one that transfers between prefill and decode."""
    assert len(started(configured, lambda own: [OTHER, own])) == 2
