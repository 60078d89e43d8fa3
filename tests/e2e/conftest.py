"""Fixtures that several files share for a whole session."""

from connector.conftest import home, raw, server
from e2e.vllm_fixtures import dp_server, engine_a, engine_b, engine_c, fleet, reference

__all__ = ["dp_server", "engine_a", "engine_b", "engine_c", "fleet", "home", "raw", "reference", "server"]
