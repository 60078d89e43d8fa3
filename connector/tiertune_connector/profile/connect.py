"""This process's only profiler, and its connection to the host's store."""

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from tiertune_connector.client.store_client import StoreClient
from tiertune_connector.profile.stages import Profiler

_profiler = Profiler()
stage = _profiler.stage


def connect(path: Path | str, *, label: str = "all", gpus: Sequence[str] = ()) -> StoreClient:
    """From now on report this process's stages to the store that listens at ``path``, whenever it is there.

    ``gpus``: UUIDs of the GPUs that the process computes on (``timers.gpu_uuid``); NVML's figures of them then carry
    ``label``. What is measured while there is no store is reported once there is. Close the returned client to end.
    ValueError for a label that no store takes, as in ``stage``.
    """
    stage(label)
    client = StoreClient(path, None, engine=f"{socket.gethostname()}:{os.getpid()}"[:64], stage=label, gpus=gpus)
    client.connect(timeout_s=0)
    _profiler.report_to(client)
    return client
