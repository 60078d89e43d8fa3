"""Which contents an adapter has: vLLM's keys hold only its name and path. Imports no vLLM.

An engine does not say what it loaded. So an adapter's contents are taken to be those of its files when it was first
loaded or requested under its id, as long as the files do not change. Of any other adapter nobody knows what the engine
has: one without safetensors, one loaded in place, one whose files changed or that came from another folder under its
id, one under whose id a load failed. Requests that name it neither read from the store nor write into it, for good.

The engine's own caches know only name and path. Where these had several contents, or unknown ones, the caches mix them,
and what is computed from them: no adapter of that name and path is known any more.

An adapter that is loaded in place, or under the id of one that was removed, also takes the place of the old one in
requests that are under way: the rest of these is computed with the new contents. So when a chunk is to leave the engine
it is asked again whether the contents are those that its key tells.
"""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tiertune_connector.vllm import weights

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(f"vllm.{__name__}")
CONFIG = "adapter_config.json"
READ = "adapter_model.safetensors"
DIGEST_BYTES = 16
MOST = 8192
"""Adapters that are remembered, 2 KB each; later ones are taken as unknown."""

Named = tuple[str, str]
"""What the engine's caches know of an adapter: name and path."""
Stamp = tuple[tuple[int, int, int, int], ...]
"""Device, inode, size and time of change of each file."""


@dataclass(eq=False)
class _Known:
    named: Named
    files: tuple[Path, ...]
    stamp: Stamp
    contents: bytes | None
    """None: unknown for good."""

    def stands(self, adapter: "LoRARequest") -> bool:
        """Whether ``adapter``, under the same id, still is what was read."""
        return not adapter.load_inplace and self.named[1] == adapter.lora_path and self.stamp == _stamp(self.files)


class AdapterDigests:
    """What a request's adapter adds to its keys. Runs on the scheduler thread; once warm it costs stat calls."""

    def __init__(self, settings: str = "") -> None:
        """``settings``: what of the engine's own decides what it computes with an adapter, if anything does."""
        self._settings = settings.encode()
        self._known: dict[int, _Known] = {}
        """By id: what was first loaded or requested under it."""
        self._served: dict[Named, bytes | None] = {}
        """Contents of what was requested, by what the engine's caches know; None: unknown, or not always the same."""

    def contents(self, adapter: "LoRARequest | None") -> bytes | None:
        """16 bytes for the contents of ``adapter``, which a request names; empty if it names none, None if unknown."""
        if adapter is None:
            return b""
        known = self._heard(adapter)
        if known is None:
            return None
        named = _named(adapter)
        if self._served.setdefault(named, known.contents) != known.contents:
            self._mixed(named)
        return self._served[named]

    @contextmanager
    def loading(self, adapter: "LoRARequest") -> Iterator[None]:
        """Around the engine's load of ``adapter``. If it fails under a new id, nothing is known under that any more.

        vLLM may keep what it could not put to use, and go on with it under the id.
        """
        new = adapter.lora_int_id not in self._known
        known = self._heard(adapter)
        try:
            yield
        except Exception:
            if new and known is not None:
                known.contents = None
                logger.warning(
                    "TierTune: adapter %s could not be loaded: chunks of what is loaded under its id are not shared",
                    adapter.lora_name,
                )
            raise

    def stands(self, adapter: "LoRARequest | None", contents: bytes | None) -> bool:
        """Whether ``contents`` are also those with which the engine has computed since.

        False for unknown contents, and for an adapter never asked for: a caller in the engine's process may have made
        that of a request's own.
        """
        if adapter is None:
            return True
        served, known = self._served.get(_named(adapter)), self._known.get(adapter.lora_int_id)
        if known is None or contents is None:
            return False
        return served == known.contents == contents and known.stands(adapter)

    def _heard(self, adapter: "LoRARequest") -> _Known | None:
        """What is known under the id of ``adapter``, which is loaded or requested; None: there are too many."""
        known = self._known.get(adapter.lora_int_id)
        if known is None:
            if len(self._known) == MOST:
                return None
            known = self._known[adapter.lora_int_id] = self._read(adapter)
            if len(self._known) == MOST:
                logger.warning("TierTune: chunks of adapters that come from now on are not shared: %d are known", MOST)
        if known.contents is not None and not known.stands(adapter):
            known.contents = None
            self._mixed(known.named)
        return known

    def _mixed(self, named: Named) -> None:
        """The engine's caches may have several contents by now."""
        if self._served.get(named, b"") is not None:  # not served yet: it changed while it was read
            self._served[named] = None
            logger.warning(
                "TierTune: adapter %s was loaded in place, or another under its id, or its files changed since the"
                " engine served it: its chunks are not shared until it is loaded under another id, and by another name"
                " or from another folder",
                named[0],
            )

    def _read(self, adapter: "LoRARequest") -> _Known:
        folder = Path(adapter.lora_path)
        try:
            folder = Path(os.path.expanduser(folder))  # noqa: PTH111 (Path's raises for a user that is none)
            shards = tuple(weights.shards(folder)) if (folder / READ).is_file() else ()
        except (OSError, ValueError):
            shards = ()
        files = (folder, folder / CONFIG, *shards)
        known = _Known(_named(adapter), files, _stamp(files), None)
        with suppress(OSError):
            if shards and not adapter.load_inplace:
                known.contents = weights.digest_of(folder / CONFIG, shards)
                if self._settings:
                    digest = hashlib.blake2b(known.contents + self._settings, digest_size=DIGEST_BYTES)
                    known.contents = digest.digest()
        if known.contents is None:
            logger.warning(
                "TierTune: the contents of adapter %s are not known (no %s in %s, or loaded in place): its chunks are"
                " not shared",
                adapter.lora_name,
                READ,
                folder,
            )
        return known


def _named(adapter: "LoRARequest") -> Named:
    return adapter.lora_name, adapter.lora_path


def _stamp(files: Iterable[Path]) -> Stamp:
    return tuple(_status(path) for path in files)


def _status(path: Path) -> tuple[int, int, int, int]:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return (0, 0, 0, 0)
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
