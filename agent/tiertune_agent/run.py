"""The agent as a process: loop and API, one leader per database, ends cleanly."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta

import httpx
from apscheduler.events import EVENT_JOB_MAX_INSTANCES, JobSubmissionEvent
from apscheduler.job import Job
from apscheduler.schedulers.background import BackgroundScheduler
from fastapi import FastAPI

from tiertune_agent.catalogue import AgentMetrics
from tiertune_agent.changes.actuator import Actuator, Tuned
from tiertune_agent.changes.control import ChangeControl
from tiertune_agent.changes.judge import Judge
from tiertune_agent.changes.operators import Operators
from tiertune_agent.changes.rounds import Rounds
from tiertune_agent.collector.direct_commands import DirectCommands
from tiertune_agent.collector.observer import Observer
from tiertune_agent.collector.samples import SampleReader
from tiertune_agent.collector.sampling import Handout
from tiertune_agent.collector.stores import Collector
from tiertune_agent.credentials import access
from tiertune_agent.engines import Engines
from tiertune_agent.history.database import DatabaseError, open_current
from tiertune_agent.history.leader import leader_of
from tiertune_agent.history.store import History
from tiertune_agent.incidents.watch import Watch
from tiertune_agent.loop import Loop
from tiertune_agent.policy.document import followed
from tiertune_agent.policy.lint import manages
from tiertune_agent.published import Published
from tiertune_agent.records import FLEET, Now, State
from tiertune_agent.remote.managed import remote_of
from tiertune_agent.settings import AgentSettings
from tiertune_agent.web import page, signing
from tiertune_agent.web.api import application
from tiertune_agent.web.look import Looks
from tiertune_agent.web.views import Views
from tiertune_agent.whatif.fleet import FleetWhatif
from tiertune_connector.documents import DocumentError
from tiertune_connector.ending import until_told
from tiertune_connector.httpd.serving import Serving, certificate
from tiertune_connector.units import Clock

log = logging.getLogger(__name__)
LOOK_S = 1.0
"""How often an agent checks who leads, so that a successor takes over soon, however long a window is."""
AHEAD_S = 3600.0
"""Nothing is pruned by a clock that is further ahead of every store's: it would take new rows for old."""
PRUNES_AFTER = timedelta(minutes=10)
"""Time that an agent has for its first rounds, which take longest, before it prunes; then it does so every hour."""
PACE = 0.5
"""How fast the agent's own time goes on while it is ahead of a clock that was set back."""


def utc_now() -> datetime:
    return datetime.now(UTC)


def steady_s() -> float:
    """Seconds by a clock that nobody sets; if possible, one that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Agent:
    """All parts of one agent, put together. DatabaseError or DocumentError if that is not possible."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        wall: Now = utc_now,
        steady_s: Clock | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """``transport`` replaces the network; ``steady_s``: seconds by a clock that nobody sets, None: by ``wall``."""
        steady = steady_s or (lambda: wall().timestamp())
        self._keep = timedelta(seconds=settings.keep)
        self._wall = wall
        self.now = now = Forward(wall, steady)
        self.policy = followed(settings.policy)
        self._remote = remote_of(settings.remote, steady, manages=manages(self.policy.content))
        to_stores = access(settings.stores_token_file, settings.stores_ca_file, transport)
        self.collector = Collector(settings.roster(now), now, steady, to_stores)
        settings.http.tokens()  # like all that may be mistaken: before a database is made
        engine = open_current(settings.database, settings.database_password_file)
        self.leader = leader_of(engine)
        self.history = History(engine, self.leader.fence)
        self._stood_by = False
        """Whether it did not lead at some time since its last round."""
        self._mutex = threading.Lock()
        self._failing: dict[str, datetime] = {}
        """Jobs whose last run ended in an error, and since when."""
        self.metrics = AgentMetrics()
        self.published = Published(self.metrics)
        self.history.decisions.observer = self.published.moved
        self.observer = Observer(settings.observe, now, steady, to_stores.tokenless, self.metrics.observed)
        self.history.named = lambda: {*self.collector.addresses, *self.observer.addresses}
        actuator = Actuator(self._client, lambda: self.collector.roster.unknown, self.history.fence)
        self.samples = SampleReader(self.collector.client)
        self.changes = ChangeControl(self.history, actuator, now)
        engines = Engines(settings.engines, to_stores.tokenless)
        self.operators = Operators(self.history, self.collector, now, engines)
        rounds = Rounds(self.history, self.changes, now=now, window_s=settings.window)
        watch = Watch(self.history, now)
        self.loop = Loop(
            collector=self.collector,
            history=self.history,
            file=self.policy,
            changes=self.changes,
            operators=self.operators,
            rounds=rounds,
            judge=Judge(self.history, self.changes, now, watch.windows.of),
            watch=watch,
            whatif=FleetWhatif(self.samples, Handout(self.collector.client), steady),
            now=now,
            window_s=settings.window,
            observer=self.observer,
            direct=DirectCommands(self.history.journal.audit_once),
            remote=self._remote,
            published=self.published,
        )
        self.app = self._application(settings)
        self.served = signing.guarded(self.app, settings.http, time.monotonic)

    def _application(self, settings: AgentSettings) -> FastAPI:
        """The API and the page."""
        views = Views(
            self.history,
            self.policy,
            leads=lambda: self.leader.leading,
            now=self.now,
            window_s=settings.window,
            stores=lambda: self.collector.addresses,
            sources=self.observer.addresses,
        )
        looks, http = Looks(views), settings.http
        app = application(views, looks, self.operators, self.changes, self.metrics, listening=http, unwell=self.unwell)
        app.include_router(page.router(looks))
        return app

    def unwell(self) -> list[str]:
        """Why nothing is tuned, summed up or pruned here now, without what only the log may say."""
        if not self.leader.leading:
            if self.leader.away:
                return ["stands by: the database is away: see the log"]
            return ["stands by: another agent leads, or the database is away"]
        failing = self._failing.copy()
        return [f"{name} fails since {at:%Y-%m-%d %H:%M:%S} UTC: see the log" for name, at in failing.items()]

    def stand(self) -> bool:
        """Check who leads. Returns whether this agent has just begun to, so that its first round is due."""
        with self._mutex:  # of all who look at the same time, one sees it begin
            led, away = self.leader.leading, self.leader.away
            leads = self.leader.leads()
        self.metrics.set("agent_leader", leads)
        if not leads:
            self._stood_by = True
            self.policy.look()  # the page shows what would be in force here
            self.published.forget()
            self.metrics.observed.rows = {}
            self._failing.clear()
        if led != leads:
            log.info("this agent leads" if leads else "this agent stands by: it lost the lead, or the database")
        if self.leader.away and not away:
            log.warning("this agent cannot lead while the database is away; it is tried again: %s", self.leader.away)
        return leads and not led

    def tick(self) -> None:
        """Run one round, if this agent leads. No error in a round ends the process: they are caught here."""
        self.stand()
        if not self.leader.leading:
            self.collector.look()  # the page shows which stores there are, also here
            if self.leader.away:
                self.metrics.count("agent_job_errors_total", "lead")
            return
        if self._stood_by:
            self._stood_by = False
            self.loop.begin()
        started = time.perf_counter()
        self._job("loop", self.loop.run_once)
        self.metrics.set("agent_samples_missed", self.samples.missed)
        self.metrics.observe("agent_loop_seconds", time.perf_counter() - started)

    def sum_up(self) -> None:
        """Sum windows up into hours, if this agent leads."""
        self._job("sum_up", lambda: self.history.retention.sum_up(self.now()))

    def prune(self) -> None:
        """Fold hours into days and drop what is too old, if this agent leads."""
        self._job("prune", self._prune)

    def _prune(self) -> None:
        now = self.now()
        if (ahead_s := self.collector.ahead_s()) > AHEAD_S:
            log.warning("nothing is pruned: the clock is %.0f s ahead of every store's", ahead_s)
            return
        unjudged = [one for one in self.history.decisions.in_state(State.SOAKING) if one.undo is None]
        self.history.retention.fold(now)
        keep = max((self._keep, *(2 * (now - one.made_at) for one in unjudged)))  # a spell as long before
        self.history.retention.prune(now, keep)  # first: of a store that is forgotten all that is left goes at once
        if not self.collector.roster.unknown:  # else it is not known yet which have left the fleet
            self.history.retention.forget(now, keep, {*self.collector.addresses, *self.observer.addresses})

    def close(self) -> None:
        self.collector.close()
        self.observer.close()
        if self._remote:
            self._remote.close()
        self.leader.resign()
        self.history.close()

    def _job(self, name: str, job: Callable[[], object]) -> None:
        if not self.leader.leading:
            return
        try:
            job()
            for kind, count in self.history.journal.open_incidents().items():
                self.metrics.set("agent_incidents", count, kind)
        except Exception as error:
            told = isinstance(error, DatabaseError)  # its message says it all
            log.error("%s failed; it is tried again: %s", name, error, exc_info=not told)  # noqa: TRY400
            self._failing.setdefault(name, self.now())
            self.metrics.count("agent_job_errors_total", name)
        else:
            self._failing.pop(name, None)
            self.metrics.set("agent_last_success_timestamp_seconds", self._wall().timestamp(), name)

    def _client(self, store: str) -> Tuned | None:
        if store == FLEET:
            return self._remote
        found = self.history.store(store)
        return self.collector.client(found.url) if found else None


class Forward:
    """The clock that all of the agent goes by: never back. One that was set back is caught up with at half its pace."""

    def __init__(self, wall: Now, steady_s: Clock) -> None:
        """``steady_s`` never goes back."""
        self._wall, self._steady_s = wall, steady_s
        self._last = wall(), steady_s()

    def __call__(self) -> datetime:
        last, at_s = self._last
        now_s = self._steady_s()
        now = max(self._wall(), last + timedelta(seconds=max(0.0, now_s - at_s) * PACE))
        self._last = now, now_s
        return now


def held_up(jobs: Iterable[Job], now: datetime) -> list[Job]:
    """Jobs that would wait for longer than from one run to the next: the scheduler's clock was set back."""
    return [job for job in jobs if job.next_run_time - now > job.trigger.interval + timedelta(seconds=LOOK_S)]


def _left_out(event: JobSubmissionEvent) -> None:
    mend = "; if it happens often, set a longer window" if event.job_id == "round" else ""
    log.warning("a %s is left out: the one before has not ended%s", event.job_id, mend)


def run(settings: AgentSettings) -> None:
    """Serve until told to end. DocumentError and DatabaseError like `Agent`, the former also if the port is taken.

    RuntimeError if it cannot answer any more.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for noisy in ("apscheduler", "alembic", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("apscheduler.scheduler").setLevel(logging.ERROR)  # what it warns of, _left_out tells
    try:
        listener = settings.http.listen()
    except OSError as error:
        raise DocumentError([str(error)]) from error
    encrypted = certificate(settings.http)
    agent = Agent(settings, steady_s=steady_s)
    scheduler = BackgroundScheduler(
        timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": 30}
    )
    scheduler.add_listener(_left_out, EVENT_JOB_MAX_INSTANCES)
    rounds = scheduler.add_job(agent.tick, "interval", id="round", seconds=settings.window, next_run_time=utc_now())
    scheduler.add_job(agent.sum_up, "interval", id="sum-up", minutes=5)
    scheduler.add_job(agent.prune, "interval", id="pruning", hours=1, next_run_time=utc_now() + PRUNES_AFTER)
    serving = Serving(agent.served, listener, encrypted)
    with until_told() as ending:
        scheduler.start()
        serving.start()
        log.info("agent serves on %s", settings.http.address(listener))
        try:
            # nobody could command an agent that does not answer; not by the scheduler, which goes by the clock
            while serving.is_alive() and not ending.wait(LOOK_S):
                try:
                    begins, now = agent.stand(), utc_now()
                    for job in (*([rounds] if begins else ()), *held_up(scheduler.get_jobs(), now)):
                        job.modify(next_run_time=now)
                except Exception:
                    log.exception("who leads could not be looked at; it is tried again")
                    agent.metrics.count("agent_job_errors_total", "lead")
        finally:
            told = ending.is_set()
            serving.stop()
            scheduler.shutdown(wait=True)
            agent.close()
            listener.close()
            log.info("agent ended")
    if not told:
        raise RuntimeError("the HTTP server ended by itself")
