"""A connector that holds nothing and counts what it is asked, to stand before TierTune's in MultiConnector."""

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

SEEN: Counter[str] = Counter(asked=0, external_tokens=0, finished=0, saved_layers=0)
"""Requests asked about, tokens said to come from a connector and finished requests; layers handed over to be saved."""


class Nothing(KVConnectorMetadata):
    pass


class StubConnector(KVConnectorBase_V1, SupportsHMA):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        SEEN["asked"] += 1
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        SEEN["external_tokens"] += num_external_tokens

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        SEEN["finished"] += 1
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, [])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        SEEN["saved_layers"] += 1

    def wait_for_save(self) -> None: ...
