"""Which tenant a request belongs to. Imports no vLLM."""

import os
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Literal

from tiertune_connector.keys import tenant_digest

KEY_VARIABLE = "TIERTUNE_TENANT_KEY"
_REMEMBERED = 1024


class Tenants:
    """Tells tenants apart by the salt of their requests, without telling the salt to the store."""

    def __init__(self, isolation: Literal["shared", "require_salt"], environment: Mapping[str, str]) -> None:
        """Its key makes a digest useless to whoever guesses salts; engines of a fleet have the same one."""
        self._isolation = isolation
        key = os.fsencode(environment.get(KEY_VARIABLE, ""))
        self._digest = lru_cache(_REMEMBERED)(partial(tenant_digest, secret=key))

    def digest(self, salt: str | None) -> bytes:
        """16 bytes; empty for a request without a salt."""
        return self._digest(salt) if salt else b""

    def allowed(self, salt: str | None) -> bool:
        """Whether a request with this salt, or none, may read and write."""
        return bool(salt) or self._isolation == "shared"
