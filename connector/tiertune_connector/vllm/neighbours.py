"""Other connectors beside TierTune's in a `MultiConnector`: which of them it cannot serve with."""

# mypy: allow-subclassing-any, no-warn-return-any
# Where mypy runs, vLLM is not installed.

from collections.abc import Iterator

from vllm.config import KVTransferConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tiertune_connector.vllm.probes import UnsupportedError


def check() -> None:
    """Raises UnsupportedError beside another `OffloadingConnector`, even one of TierTune.

    Workers alone know what is beside them.

    Both count under the same names, at which the API server ends. And vLLM's may copy blocks to its own staging while
    TierTune's loads into them: 0.32 orders copies within a connector only (`Offloading.allocated` does more for ours).
    """
    whole = get_current_vllm_config_or_none()
    transfer = whole.kv_transfer_config if whole is not None else None
    classes = _classes(transfer) if transfer is not None else ()
    offloading = [each.__name__ for each in classes if issubclass(each, OffloadingConnector)]
    if len(offloading) > 1:
        raise UnsupportedError(
            f"TierTune cannot serve in a MultiConnector with {' and '.join(offloading)}: one may store a block while"
            " another loads into it, and they count under the same names: leave one of them out"
        )


def _classes(transfer: KVTransferConfig) -> Iterator[type]:
    """Of the connectors in a `MultiConnector`, and of those in one of these, however deep."""
    for child in transfer.kv_connector_extra_config.get("connectors", []):
        inner = KVTransferConfig(**child)
        found = KVConnectorFactory.get_connector_class(inner)
        yield found
        if issubclass(found, MultiConnector):
            yield from _classes(inner)
