"""What a cache-aware router hears: KV events of vLLM's publishers, as JSON lines. Run by .venv-engine's interpreter.

``vllm_events.py FILE ENDPOINT...`` writes one line per event until it is ended:
``{"rank", "sequence", "type", "hashes", "parent", "tokens", "block_size", "medium"}``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch


def main() -> None:
    context, poller = zmq.Context.instance(), zmq.Poller()
    for endpoint in sys.argv[2:]:
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(endpoint)
        subscriber.setsockopt_string(zmq.SUBSCRIBE, "")
        poller.register(subscriber, zmq.POLLIN)
    decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
    with Path(sys.argv[1]).open("w") as out:
        while True:
            for subscriber, _ in poller.poll():
                _, sequence, payload = subscriber.recv_multipart()
                batch = decoder.decode(payload)
                for event in batch.events:
                    told = {"rank": batch.data_parallel_rank, "sequence": int.from_bytes(sequence, "big")}
                    out.write(json.dumps(told | _fields(event)) + "\n")
            out.flush()


def _fields(event: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(event).__name__}
    if isinstance(event, BlockStored | BlockRemoved):
        fields |= {"hashes": [_text(each) for each in event.block_hashes], "medium": event.medium}
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        fields |= {
            "parent": None if parent is None else _text(parent),
            "tokens": event.token_ids,
            "block_size": event.block_size,
        }
    return fields


def _text(block: bytes | int) -> str:
    return block.hex() if isinstance(block, bytes) else str(block)


if __name__ == "__main__":
    main()
