"""The JSON API. Every writing call leaves an audit row; its body is bounded, and nothing of an invalid one echoed."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tiertune_agent.catalogue import AgentMetrics
from tiertune_agent.changes.control import ChangeControl, Refused, Unknown
from tiertune_agent.changes.operators import Caller, Operators
from tiertune_agent.fields import JsonDict
from tiertune_agent.history.database import DatabaseError
from tiertune_agent.history.leader import NotLeadingError
from tiertune_agent.records import Decision
from tiertune_agent.web.look import Looks
from tiertune_agent.web.unmade import sentence, unmade
from tiertune_agent.web.views import Number, Views
from tiertune_connector.documents import Document
from tiertune_connector.httpd.guarded import called_by, same_site
from tiertune_connector.httpd.listening import Listening
from tiertune_connector.tuning import Digest
from tiertune_connector.units import Duration, parse_duration

MOST_BYTES = 64 << 10
"""Largest body: a reason has up to 500 characters, all else is shorter."""
SHORTEST_FREEZE_S, LONGEST_FREEZE_S = 1.0, 366 * 86400.0


def _bounded(value: object) -> object:
    """How long a freeze shall last, as it was written; ValueError says how long it may."""
    if value is not None and not SHORTEST_FREEZE_S <= parse_duration(value) <= LONGEST_FREEZE_S:
        raise ValueError("a freeze lasts from 1s to 366d; leave this out to freeze until it is lifted")
    return value


def _said(reason: str) -> str:
    if not reason:
        raise ValueError("say why: it is shown to everyone who asks")
    return reason


class FreezeBody(Document, strict=True):
    reason: Annotated[str, StringConstraints(strip_whitespace=True, max_length=500), AfterValidator(_said)]
    seconds: Annotated[Duration | None, BeforeValidator(_bounded)] = Field(default=None, alias="for")
    """None: until lifted."""


class BypassBody(Document, strict=True):
    on: bool
    store: Annotated[str, StringConstraints(max_length=500)] | None = None
    """None: all of them."""


class FlushBody(Document, strict=True):
    namespace: Digest | None = None
    tenant: Digest | None = None
    epoch: int | None = Field(default=None, ge=0)
    engines: bool = False
    """Also flush the engines in the agent's settings: their whole prefix caches, as they know no namespaces."""


def _caller(request: Request) -> Caller:
    return Caller(*called_by(request))


CallerOf = Annotated[Caller, Depends(_caller)]


def application(
    views: Views,
    looks: Looks,
    operators: Operators,
    changes: ChangeControl,
    metrics: AgentMetrics,
    *,
    listening: Listening,
    unwell: Callable[[], Sequence[str]],
) -> FastAPI:
    """The ASGI application; ``unwell`` returns what `/healthz` is to report."""
    schema = "/api/v1/openapi.json"
    app = FastAPI(title="TierTune agent", docs_url=None, redoc_url=None, openapi_url=schema, redirect_slashes=False)
    app.add_middleware(bounded)
    app.add_middleware(same_site, listening=listening, told="detail")

    def leading() -> None:
        if not views.leads():
            raise HTTPException(409, "this agent stands by: another one leads, or the database is away")

    app.include_router(_reading(views, looks, metrics, unwell))
    app.include_router(_writing(operators, changes), dependencies=[Depends(leading)])
    app.add_exception_handler(RequestValidationError, unprocessable)
    codes = {Unknown: 404, Refused: 409, NotLeadingError: 409, DatabaseError: 503}
    for kind, code in codes.items():
        app.add_exception_handler(kind, partial(_told, code))
    return app


def _reading(views: Views, looks: Looks, metrics: AgentMetrics, unwell: Callable[[], Sequence[str]]) -> APIRouter:
    api = APIRouter()
    for view in (views.fleet, views.policies, views.incidents, views.decisions, views.audit, views.ledger):
        api.add_api_route(f"/api/v1/{view.__name__}", view)

    @api.get("/metrics", response_class=PlainTextResponse)
    def render() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.head("/healthz", include_in_schema=False)
    @api.get("/healthz", response_class=PlainTextResponse)
    def healthz() -> Response:
        """Alive; a round that fails is reported, but is no reason to end the agent."""
        return PlainTextResponse("".join(f"{line}\n" for line in ("ok", *unwell())))

    api.add_api_route("/api/v1/decisions/{number}", views.decision)

    @api.get("/api/v1/curves")
    def curves() -> JsonDict:
        """What each pool would have hit at other sizes and with other algorithms, and what follows, in a sentence."""
        seen = looks.seen()
        return {"since": seen.since.isoformat(), "curves": [one.document() for one in seen.curves]}

    @api.get("/api/v1/auto")
    def auto() -> JsonDict:
        """What TierTune would have changed by itself where the policy lets it only recommend or observe."""
        wishes = unmade(looks.seen())
        return {"sentence": sentence(wishes), "would": [wish.document() for wish in wishes]}

    return api


def _writing(operators: Operators, changes: ChangeControl) -> APIRouter:
    api = APIRouter(prefix="/api/v1")

    def command(act: Callable[[int, str], Decision]) -> None:
        name = act.__name__

        def run(number: Number, caller: CallerOf) -> JsonDict:
            with operators.audited(caller, name, {"decision": number}):
                if act != changes.reject and (frozen := changes.frozen()):
                    raise Refused(f"nothing changes now: frozen {frozen}")
                return act(number, caller.who).document()

        api.add_api_route(f"/decisions/{{number}}/{name}", run, methods=["POST"], name=name)

    for act in (changes.approve, changes.reject, changes.rollback):
        command(act)

    @api.post("/freeze")
    def freeze(body: FreezeBody, caller: CallerOf) -> JsonDict:
        return operators.freeze(caller, body.reason, body.seconds)

    @api.post("/unfreeze")
    def unfreeze(caller: CallerOf) -> JsonDict:
        return operators.unfreeze(caller)

    @api.post("/bypass")
    def bypass(body: BypassBody, caller: CallerOf) -> JsonDict:
        return operators.bypass(caller, body.on, body.store)

    @api.post("/flush")
    def flush(request: Request, caller: CallerOf, body: FlushBody | None = None) -> JsonDict:
        if request.url.query:
            raise HTTPException(422, "say what to flush in the body, as JSON: after a ? it is not read")
        asked = body or FlushBody()
        which = asked.model_dump(exclude_none=True, exclude={"engines"})
        return operators.flush(caller, which, engines=asked.engines)

    return api


def _told(code: int, _: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, status_code=code)


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
