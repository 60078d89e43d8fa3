"""The store's HTTP: metrics, health, status, counters, samples and sampling, tuning, flush, bypass."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import Field
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from tiertune_connector import __version__
from tiertune_connector.counters import PrometheusCollector
from tiertune_connector.documents import Document, FieldError, parse_json
from tiertune_connector.httpd.guarded import READING, REMARK, bearer, behind_tokens, same_site
from tiertune_connector.httpd.listening import Listening
from tiertune_connector.httpd.tokens import Role
from tiertune_connector.keys import MAX_KEY_BYTES
from tiertune_connector.sampling.observer import Sampling, StaleError
from tiertune_connector.serve.server import Server
from tiertune_connector.serve.writes import Writes, changed, traced
from tiertune_connector.store.control import Control, KeyReusedError, NotKeptError, VersionConflictError
from tiertune_connector.store.status import status
from tiertune_connector.tiers.base import Outcome
from tiertune_connector.tuning import Digest
from tiertune_connector.units import Clock

MAX_BODY_BYTES = 1 << 20
MAX_HOT_KEYS = 1024
HotKey = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=2 * MAX_KEY_BYTES)]
"""A chunk's key in hexadecimal."""
REFUSALS: dict[Any, int] = {
    FieldError: 422,
    StaleError: 412,
    VersionConflictError: 412,
    KeyReusedError: 409,
    NotKeptError: 507,
}
"""Status that answers each."""
_BY_NAMESPACE = "flush by namespace (/v1/status tells them)"
_DIGITS = 18
_LINES = msgspec.json.Encoder()


class FlushRequest(Document):
    namespace: Digest | None = None
    tenant: Digest | None = None
    epoch: int | None = Field(default=None, ge=0)


class BypassRequest(Document):
    on: bool


class SamplingRequest(Document):
    seed: int = Field(ge=0, lt=1 << 63)
    rate: float = Field(gt=0, le=1, allow_inf_nan=False)
    hot: tuple[HotKey, ...] = Field(max_length=MAX_HOT_KEYS)
    version: int = Field(ge=1, lt=1 << 63)


def guarded(app: ASGIApp, listening: Listening, clock: Clock) -> ASGIApp:
    """The application guarded by the tokens that the settings name, if any. DocumentError if their file is bad."""
    app = same_site(app, listening)
    tokens = listening.tokens()
    if tokens is None:
        return app

    def role_of(method: str, path: str) -> Role | None:
        if method not in READING:
            return "tune"
        return None if path == "/healthz" or (listening.loopback and path != "/v1/samples") else "read"

    return behind_tokens(
        app,
        holder_of=lambda connection: tokens.holder(bearer(connection)),
        role_of=role_of,
        refuse=lambda _, code, message: _error(code, message),
        clock=clock,
    )


@dataclass(eq=False)
class Http:
    """What a store answers: metrics to Prometheus, JSON to its agent and to operators.

    ``clock`` gives monotonic seconds, ``gpus`` says whether the GPUs are watched.
    """

    server: Server
    control: Control
    clock: Clock
    gpus: Callable[[], str]
    writes: Writes

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._registry = CollectorRegistry()
        self._registry.register(PrometheusCollector(self.server.counters, self.server.store.name))

    def application(self) -> ASGIApp:
        routes = [
            Route("/metrics", self.metrics),
            Route("/healthz", self.healthz),
            Route("/v1/status", self.status),
            Route("/v1/counters", self.counters),
            Route("/v1/samples", self.samples),
            Route("/v1/sampling", self.put_sampling, methods=["PUT"]),
            Route("/v1/tuning", self.get_tuning),
            Route("/v1/tuning", self.put_tuning, methods=["PUT"]),
            Route("/v1/flush", self.flush, methods=["POST"]),
            Route("/v1/bypass", self.bypass, methods=["POST"]),
        ]
        handlers = dict.fromkeys(REFUSALS, _refused)
        return traced(Starlette(routes=routes, exception_handlers=handlers), self.writes)

    def metrics(self, request: Request) -> Response:
        accepted = request.headers.get("accept", "").replace('"', "")  # which the library takes for part of a version
        try:
            encode, content_type = choose_encoder(accepted)
        except TypeError:  # it compared what is no version
            encode, content_type = choose_encoder("")
        return Response(encode(self._registry), media_type=content_type)

    async def healthz(self, _: Request) -> Response:
        """Always alive; names unwell tiers, and a socket that has gone, which are no reason to end the store."""
        store = self.server.store
        health = {tier: store.health.told(tier) for tier in ("dram", *store.lanes)}
        unwell = [f"{tier}: {state}: {reason}\n" for tier, (state, reason) in health.items() if state != "ok"]
        if self.server.hidden:
            unwell.append(
                f"socket: {self.server.path} was removed: engines that come find no store until it is started anew\n"
            )
        return PlainTextResponse("".join(["ok\n", *unwell]))

    def status(self, _: Request) -> Response:
        sessions = self.server.sessions()
        clients = [
            {"client": s.client, "engine": s.engine, "stage": s.stage, "namespace": s.digest, "pid": s.pid or None}
            for s in sessions
        ]
        namespaces = {s.namespace.digest: s.namespace.parts for s in sessions if s.namespace is not None}
        more = {
            "boot_id": self.server.boot_id,
            "version": __version__,
            "uptime_s": self.clock() - self._started,
            "gpus": self.gpus(),
            "clients": clients,
            "namespaces": namespaces,
            "writes": self.writes.told(),
        }
        return JSONResponse(status(self.server.store) | more)

    def counters(self, request: Request) -> Response:
        """Waits for what is being studied."""
        since = _since(request, "seq")
        sequence, metrics = self.server.counters.snapshot(since)
        store = self.server.store
        return JSONResponse(
            {
                "store": store.name,
                "boot_id": self.server.boot_id,
                "seq": sequence,
                "since": since,
                "time_s": time.time(),
                "tuning_version": store.tuning.version,
                "bypass": store.tuning.bypass,
                "metrics": metrics,
            }
        )

    def samples(self, request: Request) -> Response:
        """JSON lines: a header, then samples."""
        header, samples = self.server.store.observer.read(_since(request, "next") or 0)
        lines = _LINES.encode_lines([{"boot_id": self.server.boot_id, **header}, *samples])
        return Response(lines, media_type="application/x-ndjson")

    async def put_sampling(self, request: Request) -> Response:
        """Adopt how the whole fleet samples, as its agent says."""
        wanted = parse_json(SamplingRequest, await _json(request))
        request.state.detail = {"version": wanted.version, "rate": wanted.rate}
        hot = tuple(bytes.fromhex(key) for key in wanted.hot)
        sampling = Sampling(wanted.seed, wanted.rate, hot, wanted.version)
        await run_in_threadpool(self.server.store.observer.adopt, sampling)
        return JSONResponse({"version": wanted.version})

    async def get_tuning(self, _: Request) -> Response:
        return _tuning(self.control)

    async def put_tuning(self, request: Request) -> Response:
        wanted, key = request.headers.get("if-match", ""), request.headers.get("idempotency-key", "")
        if not wanted or not key:
            return _error(428, "send If-Match with the version that the change is for, and an Idempotency-Key")
        expected = _number(wanted.removeprefix("W/").strip('"'))
        if expected is None:
            return _error(412, "the version in If-Match is no version: it is the ETag of GET /v1/tuning")
        request.state.detail = {"expected": expected}
        document, before = await _json(request), self.control.tuning.document()
        tuning = await run_in_threadpool(self.control.put, document, expected_version=expected, key=key)
        request.state.detail = changed(before, tuning.document())
        return _tuning(self.control)

    async def flush(self, request: Request) -> Response:
        if request.url.query:
            raise FieldError("", "say what to flush in the body, as JSON: after a ? it is not read")
        what = parse_json(FlushRequest, await _json(request))
        request.state.detail = what.model_dump(exclude_none=True)
        tenant = bytes.fromhex(what.tenant) if what.tenant else None
        told = await run_in_threadpool(self.server.store.flushes.drop, what.namespace, tenant, what.epoch)
        dropped = {tier: count for tier, (_, count) in told.items()}
        left = [
            f"{tier}: {outcome}, some chunks may be left"
            for tier, (outcome, _) in told.items()
            if outcome is not Outcome.OK
        ]
        if what.epoch is not None and self.server.store.pools.unknown(what.namespace):
            left.append(f"chunks are left of which no epoch is known here: {_BY_NAMESPACE}")
        if left:
            return JSONResponse({"message": "; ".join(left), "dropped": dropped}, status_code=503)
        if what.epoch is not None and not self.server.store.namespaces.of(what.epoch, what.namespace):
            remark = f"no namespace of epoch {what.epoch} is known here: {_BY_NAMESPACE}"
            return JSONResponse(dropped, headers={REMARK: remark})
        return JSONResponse(dropped)

    async def bypass(self, request: Request) -> Response:
        wanted = parse_json(BypassRequest, await _json(request))
        request.state.detail = {"on": wanted.on}
        tuning = await run_in_threadpool(self.control.bypass, on=wanted.on)
        return JSONResponse({"bypass": tuning.bypass, "version": tuning.version})


def _tuning(control: Control) -> Response:
    tuning = control.tuning
    return JSONResponse(tuning.document(), headers={"ETag": f'"{tuning.version}"'})


async def _json(request: Request) -> Any:  # noqa: ANN401 (JSON)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise FieldError("", f"the body has more than {MAX_BODY_BYTES} bytes")
    try:
        return json.loads(body or b"{}", object_pairs_hook=_once)
    except FieldError:
        raise
    except (ValueError, RecursionError) as error:
        raise FieldError("", f"the body is not JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's fields; FieldError where one is told twice, as the first would be dropped unseen."""
    told: dict[str, Any] = {}
    for name, value in pairs:
        if name in told:
            raise FieldError(name, "the field stands here a second time")
        told[name] = value
    return told


def _since(request: Request, name: str) -> int | None:
    """The ``since`` of a query, after which to tell; None without one. FieldError if it is no number."""
    text = request.query_params.get("since")
    if text is None:
        return None
    since = _number(text)
    if since is None:
        raise FieldError("since", f"expected a number that was answered as {name}")
    return since


def _number(text: str) -> int | None:
    """A version or sequence number from a header or query; None if it is none."""
    return int(text) if len(text) <= _DIGITS and text.isascii() and text.isdecimal() else None


def _error(code: int, message: str) -> Response:
    return JSONResponse({"message": message}, status_code=code)


def _refused(_: Request, error: Exception) -> Response:
    told = (
        {"field": error.field, "message": error.message} if isinstance(error, FieldError) else {"message": str(error)}
    )
    return JSONResponse(told, status_code=REFUSALS[type(error)])
