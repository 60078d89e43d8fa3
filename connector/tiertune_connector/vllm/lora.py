"""Which contents an adapter has: vLLM's keys hold only its name and path. Imports no vLLM.

An engine does not say what it loaded, nor when. So an adapter's contents are taken to be those of its files when it was
first requested under its id, as long as the files do not change. Once they change under the same id, nobody knows which
contents the engine still has, and from then on the adapter's chunks are kept from everybody, this engine included.

The engine's own caches know only name and path. After other contents were loaded under the same name and path, these
caches mix the chunks of both, and what is computed from them. So from then on none of these chunks leave the engine.
"""

import hashlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiertune_connector.vllm import weights

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(f"vllm.{__name__}")
CONFIG = "adapter_config.json"
SUFFIX_BYTES = 16

Stamp = tuple[tuple[int, int, int, int], ...]
"""Device, inode, size and time of change of each file."""


@dataclass(frozen=True)
class _Known:
    files: tuple[Path, ...]
    stamp: Stamp
    suffix: bytes | None
    """None: unknown for good."""


class AdapterDigests:
    """What a request's adapter adds to its keys. Runs on the scheduler thread; once warm it costs stat calls."""

    def __init__(self) -> None:
        self._engine = os.urandom(32)
        self._known: dict[tuple[int, str], _Known] = {}
        self._served: dict[tuple[str, str], bytes | None] = {}
        """Contents by name and path; None: they were not always the same."""

    def suffix(self, adapter: "LoRARequest | None") -> bytes:
        """16 bytes for the contents of ``adapter``; empty if there is none.

        Unknown contents (no local safetensors) get a suffix of this engine alone; changed ones a new one each time.
        """
        if adapter is None:
            return b""
        place = (adapter.lora_int_id, adapter.lora_path)
        known = self._known.get(place)
        # With `load_inplace` the engine reads the files again for every request.
        if known is None or (known.stamp != _stamp(known.files) and adapter.load_inplace):
            known = self._known[place] = self._read(adapter)
        elif known.suffix is not None and known.stamp != _stamp(known.files):
            known = self._known[place] = _Known(known.files, known.stamp, None)
        return self._unmixed(adapter, known.suffix) or os.urandom(SUFFIX_BYTES)

    def _unmixed(self, adapter: "LoRARequest", suffix: bytes | None) -> bytes | None:
        """``suffix``, if the engine served nothing else under the adapter's name and path."""
        named = (adapter.lora_name, adapter.lora_path)
        served = self._served.setdefault(named, suffix)
        if served is not None and served != suffix:
            self._served[named] = None
            logger.warning(
                "TierTune: the files of adapter %s changed, or may have, since the engine served it: its chunks are not"
                " shared until the engine restarts, or it is loaded under another name or from another folder",
                adapter.lora_name,
            )
        return self._served[named]

    def _read(self, adapter: "LoRARequest") -> _Known:
        folder = Path(adapter.lora_path).expanduser()
        shards = tuple(sorted(folder.glob("*.safetensors")))
        files = (folder, folder / CONFIG, *shards)
        stamp = _stamp(files)
        try:
            if shards:
                return _Known(files, stamp, weights.digest_of(folder / CONFIG, shards))
        except OSError:
            pass
        logger.warning(
            "TierTune: the contents of adapter %s are not known (no safetensors in %s): its chunks are not shared",
            adapter.lora_name,
            folder,
        )
        return _Known(files, stamp, None if adapter.load_inplace else self._own(adapter))

    def _own(self, adapter: "LoRARequest") -> bytes:
        """A suffix of this engine, and of this loading of the adapter, alone."""
        told = f"{adapter.lora_int_id} {adapter.lora_path}".encode()
        return hashlib.blake2b(told, key=self._engine, digest_size=SUFFIX_BYTES).digest()


def _stamp(files: Iterable[Path]) -> Stamp:
    return tuple(_status(path) for path in files)


def _status(path: Path) -> tuple[int, int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0, 0)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
