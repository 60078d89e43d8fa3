"""The agent as a process: loop and API, one leader per database, ends cleanly."""

import logging
import signal
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import httpx
import uvicorn
from apscheduler.schedulers.background import BackgroundScheduler

from tiertune_agent.actuator import Actuator, HttpActuator, NullActuator, Tuned
from tiertune_agent.catalogue import AgentMetrics
from tiertune_agent.change import ChangeControl
from tiertune_agent.collector.samples import SampleReader
from tiertune_agent.collector.sampling import Handout
from tiertune_agent.collector.stores import Collector
from tiertune_agent.history.database import Leader, open_current, sqlite_path
from tiertune_agent.history.store import History
from tiertune_agent.judge import Judge
from tiertune_agent.loop import Loop
from tiertune_agent.operators import Operators
from tiertune_agent.policy import PolicyFile
from tiertune_agent.prospects import Prospects
from tiertune_agent.records import FLEET
from tiertune_agent.remote import remote_of
from tiertune_agent.rounds import Rounds
from tiertune_agent.settings import AgentSettings
from tiertune_agent.split import REMOTE
from tiertune_agent.watch import Watch
from tiertune_agent.web.api import application
from tiertune_agent.web.page import router
from tiertune_agent.web.views import Views
from tiertune_agent.whatif import FleetWhatif

log = logging.getLogger(__name__)


def utc_now() -> datetime:
    return datetime.now(UTC)


class Agent:
    """All parts of one agent, put together. DatabaseError or DocumentError if that is not possible."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        dry_run: bool = False,
        now: Callable[[], datetime] = utc_now,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``transport`` may stand for the network to the stores."""
        self._keep = timedelta(seconds=settings.keep)
        self._now = now
        self.policy = PolicyFile(settings.policy)
        managed = self.policy.loaded.policy.for_target(REMOTE).remote.manage
        self._remote = remote_of(settings.remote, managed=managed)
        self.history = History(open_current(settings.database))
        self.leader = Leader(sqlite_path(settings.database))
        self.metrics = AgentMetrics()
        self.history.decisions.observer = lambda tuner, state: self.metrics.count("agent_decisions_total", tuner, state)
        self.collector = Collector(settings.stores, now, transport)
        actuator: Actuator = NullActuator() if dry_run else HttpActuator(self._client)
        whatif = FleetWhatif(SampleReader(self.collector.client), Handout(self.collector.client))
        self.prospects = Prospects(self.history, whatif, now)
        self.changes = ChangeControl(self.history, actuator, now)
        self.operators = Operators(self.history, self.collector.client, now, self.collector.addresses)
        rounds = Rounds(self.history, self.changes, self.operators.frozen, now=now, window_s=settings.window)
        self.loop = Loop(
            self.collector,
            self.history,
            self.policy,
            changes=self.changes,
            operators=self.operators,
            rounds=rounds,
            judge=Judge(self.history, self.changes, self.operators.frozen, now),
            watch=Watch(self.history, now),
            prospects=self.prospects,
            now=now,
            remote=self._remote,
        )
        views = Views(self.history, self.policy, leads=self.leader.leads, now=now, window_s=settings.window)
        self.app = application(
            views, self.operators, self.changes, self.metrics, leads=self.leader.leads, hosts=(settings.http.host,)
        )
        self.app.include_router(router(views, self.history, now=now, window_s=settings.window))

    def tick(self) -> None:
        """One round, if this agent leads. The edge: nothing that goes wrong in a round ends the process."""
        self.metrics.set("agent_leader", self.leader.leads())
        if self.leader.leads():
            started = time.perf_counter()
            self._job("loop", self.loop.run_once)
            self.metrics.set("agent_samples_missed", self.prospects.missed)
            self.metrics.observe("agent_loop_seconds", time.perf_counter() - started)

    def sum_up(self) -> None:
        """Windows into hours."""
        if self.leader.leads():
            self._job("sum_up", lambda: self.history.sum_up(self._now()))

    def prune(self) -> None:
        if self.leader.leads():
            self._job("prune", lambda: self.history.prune(self._now() - self._keep))

    def close(self) -> None:
        self.collector.close()
        if self._remote:
            self._remote.close()
        self.history.close()
        self.leader.resign()

    def _job(self, name: str, job: Callable[[], object]) -> None:
        try:
            job()
            for kind, count in self.history.open_incidents().items():
                self.metrics.set("agent_incidents", count, kind)
        except Exception:
            log.exception("%s failed; it is tried again", name)
            self.metrics.count("agent_job_errors_total", name)
        else:
            self.metrics.set("agent_last_success_timestamp_seconds", self._now().timestamp(), name)

    def _client(self, store: str) -> Tuned | None:
        if store == FLEET:
            return self._remote
        found = next((known for known in self.history.stores() if known.name == store), None)
        return self.collector.client(found.url) if found else None


def run(settings: AgentSettings, *, dry_run: bool = False) -> None:
    """Serve until SIGTERM or SIGINT. OSError if the port is taken; DatabaseError, DocumentError as above."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for noisy in ("apscheduler", "alembic", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    listener = _listen(settings.http.host, settings.http.port)
    agent = Agent(settings, dry_run=dry_run)
    scheduler = BackgroundScheduler(
        timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": 30}
    )
    scheduler.add_job(agent.tick, "interval", seconds=settings.window, next_run_time=utc_now())
    scheduler.add_job(agent.sum_up, "interval", minutes=5)
    scheduler.add_job(agent.prune, "interval", hours=1)
    server = uvicorn.Server(uvicorn.Config(agent.app, log_level="warning", access_log=False, lifespan="off"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises the signal again when it has ended
    scheduler.start()
    log.info("agent serves on http://%s:%s", *listener.getsockname()[:2])
    try:
        server.run(sockets=[listener])
    finally:
        scheduler.shutdown(wait=True)
        agent.close()
        listener.close()
        log.info("agent ended")


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise OSError(f"http {host}:{port}: {error.strerror}") from error
    return listener
