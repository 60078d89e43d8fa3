"""Entry point `vllm.general_plugins`: vLLM calls `register` in every one of its processes."""

NAME = "TierTuneConnector"


def register() -> None:
    """Make `"kv_connector": "TierTuneConnector"` known to vLLM. Idempotent; the connector loads where it is used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:  # noqa: SLF001 (vLLM has no public way to ask)
        KVConnectorFactory.register_connector(NAME, "tiertune_connector.vllm.connector", NAME)
