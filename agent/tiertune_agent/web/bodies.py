"""Limits how many bytes a call may send, and answers invalid calls without echoing anything of them."""

import json

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 64 << 10
"""Largest body: a reason has up to 500 characters, all else is shorter."""


def bounded(app: ASGIApp) -> ASGIApp:
    """The application, which answers 413 to a longer body, and reads no more of it."""

    async def answered(scope: Scope, receive: Receive, send: Send) -> None:
        heard = 0

        async def limited() -> Message:
            nonlocal heard
            message = await receive()
            heard += len(message.get("body", b""))
            if heard > MOST_BYTES:
                raise HTTPException(413, f"the body has more than {MOST_BYTES} bytes")
            return message

        await app(scope, limited, send)

    return answered


def unprocessable(_: Request, error: Exception) -> Response:
    """Like FastAPI's own answer without what was sent: half a character or ``NaN`` cannot go into an answer."""
    assert isinstance(error, RequestValidationError)
    problems = [
        {"type": problem["type"], "loc": problem["loc"], "msg": problem["msg"].removeprefix("Value error, ")}
        for problem in error.errors()
    ]
    return Response(json.dumps({"detail": problems}), 422, media_type="application/json")
