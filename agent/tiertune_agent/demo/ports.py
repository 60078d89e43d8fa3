"""Free TCP ports of this machine for short-lived servers."""

import random
import socket
from contextlib import suppress

PORTS = range(16_384, 32_000)
"""Below Linux's ephemeral ports: a client that polls a port for its server can neither take it nor meet itself."""


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    while True:
        port = random.choice(PORTS)  # noqa: S311 (nobody gains by guessing it)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
