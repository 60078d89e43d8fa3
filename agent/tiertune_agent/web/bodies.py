"""Limits how many bytes a call may send, and answers invalid calls without echoing anything of them."""

import json

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 64 << 10
"""Largest body: a reason has up to 500 characters, all else is shorter."""


class Bounded:
    """An application that answers 413 to a longer body, and reads no more of it. An ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As every ASGI application."""
        heard = 0

        async def bounded() -> Message:
            nonlocal heard
            message = await receive()
            heard += len(message.get("body", b""))
            if heard > MOST_BYTES:
                raise HTTPException(413, f"the body has more than {MOST_BYTES} bytes")
            return message

        await self._app(scope, bounded, send)


def unprocessable(_: Request, error: Exception) -> Response:
    """Like FastAPI's own answer without what was sent: half a character or ``NaN`` cannot go into an answer."""
    assert isinstance(error, RequestValidationError)
    problems = [
        {"type": problem["type"], "loc": problem["loc"], "msg": problem["msg"].removeprefix("Value error, ")}
        for problem in error.errors()
    ]
    return Response(json.dumps({"detail": problems}), 422, media_type="application/json")
