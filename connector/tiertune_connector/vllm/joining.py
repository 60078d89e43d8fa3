"""How an engine joins its host's store: it connects, and starts one if none listens. Imports no vLLM."""

import logging
from functools import partial
from pathlib import Path

from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.keys import Namespace
from tiertune_connector.protocol.messages import LABEL_CHARS
from tiertune_connector.serve import embedded
from tiertune_connector.tiers.segment import allow_descriptors
from tiertune_connector.vllm.settings import EngineSettings

logger = logging.getLogger(f"vllm.{__name__}")


def join(settings: EngineSettings, namespace: Namespace, *, chunk_bytes: int, engine: str) -> StoreClient:
    """The client of the engine with that id; without a store, it keeps trying, and finds nothing meanwhile."""
    allow_descriptors()
    path = Path(settings.socket)
    client = StoreClient(
        path,
        namespace,
        chunk_bytes=chunk_bytes,
        chunk_tokens=namespace.chunk_tokens,
        engine=engine[-LABEL_CHARS:],  # its end tells ranks apart
        stage=settings.stage,
        owner=embedded.owner(path),
    )
    ensure = partial(embedded.ensure, path, dram_bytes=settings.store_dram)
    ensure()
    if settings.store_dram > 0:  # an embedded store of another version may still be there, and ends without clients
        client.successor = ensure
    if not client.connect(timeout_s=settings.connect_timeout):
        why = client.refusal or client.failure or f"none answers within {settings.connect_timeout:g} s"
        logger.warning("TierTune: no store at %s (%s); prompts are recomputed until there is one", settings.socket, why)
    return client
