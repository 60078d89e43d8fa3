"""Who told the store what, from where and when: a log line for each write, and the last ones for the status.

An operator may write to a store past the agent, or while there is none: the agent books that when it is back.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

from anyio import move_on_after, to_thread
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiertune_connector.documents import Json, differences
from tiertune_connector.httpd.guarded import READING, called_by
from tiertune_connector.state import StateDir

log = logging.getLogger(__name__)
FILE = "writes.json"
KEPT = 64
MOST_FIELDS = 8
"""Fields of a tuning to tell with both values."""
MOST_CLIENT = 80
"""Characters."""
ELSEWHERE = (307, 404, 405)
"""Answers where there is nothing to write."""
_PATIENCE_S = 1.0
"""Wait for the state directory before an answer: agents give one up after three."""


@dataclass(eq=False)
class Writes:
    """The last writes, oldest first, kept over restarts. Not those to ``/v1/sampling``: nobody commands them."""

    state: StateDir
    now: Callable[[], datetime]

    def __post_init__(self) -> None:
        self._saving = threading.Lock()
        self._kept = tuple(self.state.kept(FILE, list[Json]))

    def told(self) -> list[Json]:
        return list(self._kept)

    def add(self, connection: HTTPConnection, status: int) -> bool:
        """Note a write whose answer is about to be given; whether to ``save`` it. A refused one is only logged.

        Not thread-safe.
        """
        who, source = called_by(connection)
        path, detail = connection.scope["path"].strip("\r\n"), connection.scope.get("state", {}).get("detail", {})
        write = {
            "at": self.now().isoformat(),
            "who": who,
            "source": source,
            "client": connection.headers.get("user-agent", "")[:MOST_CLIENT],
            "what": path.removeprefix("/v1/"),
            "detail": detail,
            "status": status,
        }
        log.info("write %s", json.dumps(write))
        if write["what"] == "sampling" or 400 <= status < 500:
            return False
        self._kept = (*self._kept, write)[-KEPT:]
        return True

    def save(self) -> None:
        """Keep what was noted over restarts. Waits for the state directory, but not for others that hang there."""
        if not self._saving.acquire(timeout=_PATIENCE_S):
            return  # whoever saves next saves them all
        try:
            self.state.keep(FILE, self._kept)
        except OSError as error:
            log.error("the last writes are not kept: %s", error)  # noqa: TRY400 (its message says it all)
        finally:
            self._saving.release()


def traced(app: ASGIApp, writes: Writes) -> ASGIApp:
    """The same application; each writing call leaves a trace before it is answered."""

    async def tracing(scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            start = message["type"] == "http.response.start" and message["status"] not in ELSEWHERE
            if start and writes.add(HTTPConnection(scope), message["status"]):
                with move_on_after(_PATIENCE_S) as waiting:
                    await to_thread.run_sync(writes.save, abandon_on_cancel=True)
                if waiting.cancelled_caught:
                    log.error("the last writes are not kept yet: the state directory does not answer")
            await send(message)

        writing = scope["type"] == "http" and scope["method"] not in READING
        await app(scope, receive, noting if writing else send)

    return tracing


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Json:
    """Changed fields by dotted name, with both values; ``more`` counts those left out."""
    fields = differences(before, after)
    told: Json = {"changed": dict(islice(fields, MOST_FIELDS))}
    more = sum(1 for _ in fields)
    return told | ({"more": more} if more else {})
