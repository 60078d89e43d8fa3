"""Which contents an adapter has: vLLM's keys hold only its name and path. Imports no vLLM.

An engine does not say what it loaded, nor when. So an adapter's contents are taken to be those of its files when it was
first requested under its id, as long as the files do not change. Once they change under the same id, nobody knows which
contents the engine still has, and from then on the adapter's chunks are kept from everybody, this engine included.

The engine's own caches know only name and path. After other contents were loaded under the same name and path, these
caches mix the chunks of both, and what is computed from them. So from then on none of these chunks leave the engine. If
adapters also compute how images are encoded, vLLM keeps what was encoded by the adapter's name alone, so that contents
from another path mix it too.

An adapter that is loaded in place, from changed files or another folder, also takes the place of the old one in
requests that are under way: the rest of these is computed with the new contents. So when a chunk is to leave the engine
it is asked again whether the contents are those that its key tells.
"""

import hashlib
import logging
import os
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tiertune_connector.vllm import weights

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(f"vllm.{__name__}")
CONFIG = "adapter_config.json"
READ = "adapter_model.safetensors"
UNREAD = ("adapter_model.bin", "adapter_model.pt")
"""What vLLM loads where the one above is missing, whatever else there is: watched, not read."""
SUFFIX_BYTES = 16

Named = tuple[str, str]
"""What the engine's caches know of an adapter: name and path, or the name alone."""
Stamp = tuple[tuple[int, int, int, int], ...]
"""Device, inode, size and time of change of each file."""


@dataclass(frozen=True)
class _Known:
    adapter: "LoRARequest"
    files: tuple[Path, ...]
    stamp: Stamp
    suffix: bytes | None
    """None: unknown for good."""
    read: bool
    """Whether ``suffix`` tells contents; else no file tells when these change."""

    def moved(self, adapter: "LoRARequest") -> bool:
        """Whether ``adapter`` is from another folder, or its files have changed or, never read, may have."""
        unread = adapter.load_inplace and not self.read
        return unread or self.adapter.lora_path != adapter.lora_path or self.stamp != _stamp(self.files)


class AdapterDigests:
    """What a request's adapter adds to its keys. Runs on the scheduler thread; once warm it costs stat calls."""

    def __init__(self, settings: str = "", *, encoding: bool = False) -> None:
        """``settings``: what of the engine's own decides what it computes with an adapter, if anything does.

        ``encoding``: adapters also compute how images and the like are encoded.
        """
        self._engine = os.urandom(32)
        self._settings = settings.encode()
        self._encoding = encoding
        self._known: dict[int, _Known] = {}
        """By id: what was last loaded under it."""
        self._served: dict[Named, bytes | None] = {}
        """Contents by what the engine's caches know; None: they were not always the same."""

    def suffix(self, adapter: "LoRARequest | None") -> bytes:
        """16 bytes for the contents of ``adapter``, which a request names; empty if it names none.

        Unknown contents (no local safetensors) get a suffix of this engine alone; changed ones a new one each time.
        """
        if adapter is None:
            return b""
        known = self._known.get(adapter.lora_int_id)
        if known is None:
            known = self._read(adapter)
        elif known.moved(adapter):
            self._mixed(self._named(known.adapter))
            # Both would be loaded in place for each step: nobody knows which one a step of both has.
            alone = adapter.load_inplace and not known.adapter.load_inplace
            known = self._read(adapter) if alone else replace(known, suffix=None)
        self._known[adapter.lora_int_id] = known
        named = self._named(adapter)
        if self._served.setdefault(named, known.suffix) != known.suffix:  # the engine's caches have something else
            self._mixed(named)
        return self._served[named] or os.urandom(SUFFIX_BYTES)

    def stands(self, adapter: "LoRARequest | None", suffix: bytes) -> bool:
        """Whether ``suffix`` also tells what the engine has computed with ``adapter`` since.

        False for one never asked for: a caller in the engine's process may have made that of a request's own.
        """
        if adapter is None:
            return True
        served, known = self._served.get(self._named(adapter)), self._known.get(adapter.lora_int_id)
        return known is not None and served == known.suffix == suffix and not known.moved(adapter)

    def _named(self, adapter: "LoRARequest") -> Named:
        return adapter.lora_name, "" if self._encoding else adapter.lora_path

    def _mixed(self, named: Named) -> None:
        if self._served[named] is None:
            return
        self._served[named] = None
        logger.warning(
            "TierTune: the files of adapter %s changed, or may have, since the engine served it: its chunks are not"
            " shared until the engine restarts, or it is loaded under another name%s",
            named[0],
            "" if self._encoding else ", or is unloaded and then loaded from another folder",
        )

    def _read(self, adapter: "LoRARequest") -> _Known:
        folder = Path(adapter.lora_path).expanduser()
        shards = tuple(sorted(folder.glob("*.safetensors"))) if (folder / READ).is_file() else ()
        files = (folder, folder / CONFIG, *(shards or (folder / name for name in UNREAD)))
        stamp, as_told = _stamp(files), copy(adapter)  # an engine in process has its caller's own object
        try:
            if shards:
                contents = weights.digest_of(folder / CONFIG, shards)
                if self._settings:
                    contents = hashlib.blake2b(contents + self._settings, digest_size=SUFFIX_BYTES).digest()
                return _Known(as_told, files, stamp, contents, read=True)
        except OSError:
            pass
        logger.warning(
            "TierTune: the contents of adapter %s are not known (no %s in %s): its chunks are not shared",
            adapter.lora_name,
            READ,
            folder,
        )
        told = f"{adapter.lora_int_id} {adapter.lora_path}".encode()  # by this engine, and this loading, alone
        own = hashlib.blake2b(told, key=self._engine, digest_size=SUFFIX_BYTES).digest()
        return _Known(as_told, files, stamp, None if adapter.load_inplace else own, read=False)


def _stamp(files: Iterable[Path]) -> Stamp:
    return tuple(_status(path) for path in files)


def _status(path: Path) -> tuple[int, int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return (0, 0, 0, 0)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
