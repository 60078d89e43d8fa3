"""What makes chunks exchangeable: the namespace. A chunk's own key is opaque bytes given by the engine."""

import hashlib
from functools import cached_property

import msgspec

FORMAT_VERSION = 2
"""Version of the chunk header and payload; part of every namespace."""

MAX_KEY_BYTES = 64
PLAIN = ("model", "chunk_tokens", "hash_algorithm", "epoch")
"""Fields of a namespace that are short enough to show as they are."""


class Namespace(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """All that two engines must share before one may read what the other wrote.

    A field that an engine cannot determine stays empty; it then matches only engines that cannot determine it either.
    A store refuses engines with a field that it does not know: without it, unlike ones would share.
    """

    model: str
    """Name as served; for people, and part of the digest."""
    weights: str = ""
    """Hub commit, or a digest of config and weight files."""
    dtype: str = ""
    """Served and KV data types."""
    kv_layout: str = ""
    """Groups, tokens per block, page bytes, layers, and how they lie in memory."""
    parallel: str = ""
    """Tensor, pipeline and context parallel sizes and ranks."""
    chunk_tokens: int = 0
    hash_algorithm: str = ""
    hash_seed: str = ""
    epoch: int = 0
    """Raised by operators with new weights, so that chunks of the old ones can be flushed."""

    @cached_property
    def digest(self) -> str:
        """32 hex characters over all fields and the format version."""
        fields = msgspec.msgpack.encode([FORMAT_VERSION, *msgspec.structs.astuple(self)])
        return hashlib.blake2b(fields, digest_size=16).hexdigest()

    @property
    def parts(self) -> dict[str, str]:
        """Every field in short, to show where two namespaces differ; long fields as a digest each."""
        texts = ((name, str(value)) for name, value in msgspec.structs.asdict(self).items())
        return {
            name: hashlib.blake2b(text.encode(), digest_size=6).hexdigest() if text and name not in PLAIN else text
            for name, text in texts
        }


def tenant_digest(salt: str, secret: bytes) -> bytes:
    """16 bytes that stand for a tenant without revealing its salt (keyed BLAKE2b); empty for no salt."""
    told = salt.encode(errors="surrogatepass")  # JSON may hold half a character
    return hashlib.blake2b(told, key=secret[:64], digest_size=16).digest() if salt else b""
