"""What a call may send: so many bytes; and the answer to what is wrong with it, in which nothing of it comes back."""

import json

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 64 << 10
"""Of a body: a reason has 500 characters, all else is shorter."""


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
    """As FastAPI's own, which shows what was sent too: half a character and ``NaN`` have no place in an answer."""
    assert isinstance(error, RequestValidationError)
    problems = [{name: problem[name] for name in ("type", "loc", "msg")} for problem in error.errors()]
    return Response(json.dumps({"detail": problems}), 422, media_type="application/json")
