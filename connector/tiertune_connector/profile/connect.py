"""The one profiler of this process, and its way to the store of the host."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.profile.stages import Profiler

_profiler = Profiler()
stage = _profiler.stage


def connect(path: Path | str, *, label: str = "all", gpus: Sequence[str] = ()) -> StoreClient:
    """Report what this process's stages take to the store that listens at ``path``, from now on, whenever it is there.

    ``gpus``: UUIDs of the GPUs that the process computes on (``timers.gpu_uuid``); what NVML tells of them then
    carries ``label``. What is measured while no store is there is told when there is one. Close the answer to end.
    """
    client = StoreClient(path, None, engine=f"{socket.gethostname()}:{os.getpid()}"[:64], stage=label, gpus=gpus)
    client.connect(timeout_s=0)
    _profiler.report_to(client)
    return client
