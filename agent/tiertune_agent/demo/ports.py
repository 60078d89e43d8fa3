"""Free TCP ports of this machine for short-lived servers."""

import random
import socket
from contextlib import ExitStack, suppress

PORTS = range(16_384, 32_000)
"""Below Linux's ephemeral ports: a client that polls a port for its server can neither take it nor meet itself."""


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of ``count`` consecutive ones."""
    while True:
        first = random.choice(PORTS)  # noqa: S311 (nobody gains by guessing it)
        with ExitStack() as probes, suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def taken(port: int) -> str:
    """Why nothing can listen on a loopback port; empty: it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return str(error.strerror)
    return ""
