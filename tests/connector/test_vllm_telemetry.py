"""What an engine tells of a request: what came of its load; of a holdout its seconds to the first token, or its end."""

from concurrent.futures import Future

import pytest

from connector.traces import Sink
from tiertune_connector.client.store_client import Loaded
from tiertune_connector.cost import Candidate, GateDecision, Reason
from tiertune_connector.profile.steps import Steps
from tiertune_connector.protocol.messages import FirstToken, LookupReply, TierReport
from tiertune_connector.protocol.reporting import gained_s, recomputed
from tiertune_connector.tracing import RequestTrace, Tracing
from tiertune_connector.vllm import telemetry
from tiertune_connector.vllm.lookups import Ask
from tiertune_connector.vllm.transfers import Job

CHUNK = 16
REPORT = TierReport("remote", 4, 64, 0, "off", 0.1, 0.2, None, "skipped")
PROMPT = 100


class Client:
    """Keeps what it is told."""

    connected = True

    def __init__(self):
        self.first_tokens = []
        self.reports = []

    def report_steps(self, steps):
        return True

    def tell(self, message):
        if isinstance(message, FirstToken):
            self.first_tokens.append((message.tokens, message.seconds, message.group))
        else:
            self.reports.append(message.tiers)


TRACE = "r", None, PROMPT, 4, 100.0, 0
"""Of a request that is traced."""


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def told(client, monkeypatch):
    monkeypatch.setattr(telemetry, "monotonic", lambda: 107.5)
    steps = Steps(stage="all", clock=lambda: 0.0, observe=lambda *_: None, decode_tokens=1, ranks=1)
    made = telemetry.Telemetry(client, steps=steps, tracing=Tracing(), chunk_tokens=CHUNK)
    yield made
    made._reporter.close()


def ask(*, group="fetched", tier="remote", decided=True):
    reply = Future()
    reply.set_result(LookupReply(1, [tier] * 4, {}, {}, group=group))
    candidate = Candidate(tier, 4, 0, Reason.OFF, 0.1, 0.2)
    decision = GateDecision(0, tier, Reason.OFF, 0.1, 0.2, (candidate,)) if decided else None
    return Ask("r", PROMPT, [], [], reply, 100.0, RequestTrace(*TRACE, reports=[REPORT]), decision=decision)


@pytest.fixture
def sink(told):
    """Where traces end."""
    told.tracing.sink = Sink()
    return told.tracing._ended


def test_an_answer_that_comes_too_late_changes_no_trace(told, sink):
    """The request has gone on without it, and its trace tells until when it waited."""
    one = ask(decided=False)
    one.wanted_at = 100.0
    told.settled(one)
    told.answered(one)
    told.finished(one, one.trace)
    (trace,) = sink
    assert (trace.looked_up_at, trace.tiers, trace.late) == (107.5, (), True)


def test_a_request_that_the_store_was_not_asked_about_is_traced_all_the_same(told, sink):
    """It waited for nothing."""
    trace = RequestTrace(*TRACE)
    told.finished(None, trace)
    assert list(sink) == [trace] == [RequestTrace(*TRACE)]


@pytest.mark.parametrize("group", ["held", "fetched"])
def test_a_first_token_is_told_once(told, client, group):
    """One message, with its group and the tokens found in the remote."""
    request = ask(group=group)
    told.first_token(request)
    assert client.first_tokens == [(64, 7.5, group)]
    told.first_token(request)
    told.finished(request, None)
    assert len(client.first_tokens) == 1


def test_a_request_without_a_first_token_tells_when_it_ends(told, client):
    """It failed, or was aborted: its group must not lose it."""
    request = ask()
    told.finished(request, None)
    told.first_token(request)
    assert client.first_tokens == [(64, 7.5, "fetched")]


@pytest.mark.parametrize("other", [{"group": ""}, {"tier": "dram"}, {"decided": False}])
def test_only_requests_of_a_holdout_with_remote_chunks_tell(told, client, other):
    """Without a holdout, or without candidates in the remote, there is nothing to measure."""
    told.first_token(ask(**other))
    assert client.first_tokens == []


def test_that_nothing_is_fetched_is_reported_with_the_answer(told, client):
    """Once, and not first when the request ends, which may be minutes later."""
    request = ask()
    request.trace.reports = ()
    for _ in range(2):
        told.settled(request)
        ((report,),) = client.reports
        assert (report.tier, report.outcome) == ("remote", "skipped")
    told.finished(request, request.trace)
    assert len(client.reports) == 1


CHAIN = [b"a", b"b", b"c", b"d"]


def fetching():
    """A request whose gate fetches one chunk of DRAM and two of the remote; the first of its chunks was there."""
    reply = Future()
    reply.set_result(LookupReply(1, ["dram", "dram", "remote", "remote"], {}, {}))
    candidates = tuple(
        Candidate(tier, chunks, chunks, Reason.CHEAPER, 0.1, 0.2) for tier, chunks in (("dram", 1), ("remote", 2))
    )
    decision = GateDecision(4, "remote", Reason.CHEAPER, 0.2, 0.4, candidates)
    trace = RequestTrace(*TRACE)
    return Ask("r", PROMPT, CHAIN, [], reply, 100.0, trace, wanted_at=100.0, decision=decision, cut_tokens=4 * CHUNK)


def load(*done, keys=(b"b", b"c", b"d")):
    return Job(1, "r", list(keys), [0] * len(keys), loads=True, started=100.0, seconds=0.5, done=list(done))


def reported(client):
    """Of each tier its outcome, and the tokens that were computed although it had them."""
    (reports,) = client.reports
    return {report.tier: (report.outcome, recomputed(report)) for report in reports}


@pytest.mark.parametrize(
    ("had", "outcomes"),
    [
        (0, {"dram": ("failed", CHUNK), "remote": ("failed", 2 * CHUNK)}),
        (1, {"dram": ("failed", CHUNK), "remote": ("failed", 2 * CHUNK)}),
        (2, {"dram": ("lost", 0), "remote": ("failed", 2 * CHUNK)}),
        (3, {"dram": ("lost", 0), "remote": ("won", CHUNK)}),
        (4, {"dram": ("lost", 0), "remote": ("won", 0)}),
    ],
)
def test_a_load_of_which_the_scheduler_takes_nothing_has_failed(told, client, had, outcomes):
    """All that it brought is computed again; of one that it takes in part the rest is."""
    request = fetching()
    told.loaded(request, load(b"b", b"c", b"d"))
    told.begun(request, had * CHUNK)
    told.finished(request, None)
    assert reported(client) == outcomes


def test_of_a_load_that_is_taken_in_part_the_rest_was_fetched_in_vain(told, client):
    """It took as long as all that it brought; what it saved, and was foretold, is that of the part."""
    request = fetching()
    told.loaded(request, load(b"b", b"c", b"d"))
    told.begun(request, 3 * CHUNK)
    _, remote = client.reports[0]
    assert (remote.tokens, remote.fetched_tokens, remote.vain_tokens) == (2 * CHUNK, 2 * CHUNK, CHUNK)
    assert (remote.fetch_s, remote.recompute_s) == (0.05, 0.1)


@pytest.mark.parametrize(
    ("done", "again"),
    [([], (1, 2)), ([b"b"], (0, 2)), ([b"b", b"c"], (0, 1)), ([b"c", b"d"], (1, 2))],
)
def test_what_a_failed_load_brought_is_not_computed_again(told, client, done, again):
    """As far as nothing is missing before it, of whatever tier: what left DRAM after the lookup has not come either."""
    request = fetching()
    told.loaded(request, load(*done))
    told.begun(request, len(done) * CHUNK)
    told.finished(request, None)
    assert reported(client) == {"dram": ("failed", again[0] * CHUNK), "remote": ("failed", again[1] * CHUNK)}


@pytest.mark.parametrize(("done", "gained"), [([], -0.5), ([b"b"], -0.3), ([b"b", b"c"], -0.2), ([b"c", b"d"], -0.5)])
def test_what_a_failed_load_brought_is_saved(told, client, done, gained):
    """Else a store whose DRAM holds only the head of a prompt would seem to lose with each fetch."""
    request = fetching()
    told.loaded(request, load(*done))
    (reports,) = client.reports
    assert sum(gained_s(report) for report in reports) == pytest.approx(gained)


def test_a_head_without_the_chunks_of_another_group_saves_nothing(told, client):
    """vLLM goes no further than all groups do."""
    request = fetching()
    told.loaded(request, load(b"b", b"c", b"d", keys=(b"b", b"c", b"d", b"window")))
    assert reported(client) == {"dram": ("failed", CHUNK), "remote": ("failed", 2 * CHUNK)}


@pytest.mark.parametrize(
    ("more", "beside", "shared"), [([], False, False), ([], True, True), ([b"window"], False, True)]
)
def test_a_load_beside_others_or_of_several_groups_is_no_measure_of_its_tiers(told, client, more, beside, shared):
    """Its seconds are also those of other requests' chunks, or of chunks that are not the chain's."""
    request = fetching()
    keys = [*CHAIN[1:], *more]
    job = load(*keys, keys=keys)
    job.shared = beside
    told.loaded(request, job)
    told.begun(request, 4 * CHUNK)
    assert [report.shared for report in client.reports[0]] == [shared, shared]


@pytest.mark.parametrize(("had", "again"), [(None, (0, 0)), (0, (1, 2)), (3, (0, 1)), (4, (0, 0))])
def test_what_was_chosen_and_not_begun_is_computed_again(told, client, had, again):
    """Where staging had no room; but not what other requests' loads brought, or that of a request that ended before."""
    request = fetching()
    if had is not None:
        told.begun(request, had * CHUNK)
        told.begun(request, 4 * CHUNK)
    told.finished(request, None)
    assert reported(client) == {"dram": ("skipped", again[0] * CHUNK), "remote": ("skipped", again[1] * CHUNK)}


def test_a_tier_whose_chunks_all_came_in_vain_has_failed_beside_one_of_use(told, client):
    """Its seconds are its own, and not DRAM's; a chunk that came by another's load counts with neither."""
    request = fetching()
    job = load(b"b", b"d", keys=(b"b", b"d"))
    job.reply = Loaded([], ["hit"] * 2, {"remote": 0.4}, 0, 0)
    told.loaded(request, job)
    told.begun(request, 3 * CHUNK)
    (reports,) = client.reports
    tokens = [(report.tokens, report.fetched_tokens, report.vain_tokens) for report in reports]
    assert tokens == [(CHUNK, CHUNK, 0), (CHUNK, CHUNK, CHUNK)]
    assert [(report.outcome, report.actual_s) for report in reports] == [
        ("won", pytest.approx(0.1)),
        ("failed", pytest.approx(0.4)),
    ]
    assert gained_s(reports[1]) == pytest.approx(-0.4)


@pytest.mark.parametrize(("done", "remote"), [([b"b", b"c", b"d"], 2), ([b"b", b"c"], 1)])
def test_what_a_request_that_ended_first_did_not_take_is_not_computed_again(told, client, done, remote):
    """What its load brought is told all the same, as its seconds were the link's; what it was worth nobody knows."""
    request = fetching()
    told.loaded(request, load(*done, keys=done))
    told.settled(request)
    told.finished(request, None)
    assert reported(client) == {"dram": ("unknown", 0), "remote": ("unknown", 0)}
    assert [report.fetched_tokens for report in client.reports[0]] == [CHUNK, remote * CHUNK]
    assert [gained_s(report) for report in client.reports[0]] == [None, None]


def test_a_trace_tells_when_a_load_ended(told):
    """And not when the scheduler takes what it brought, which may be a step later."""
    request = fetching()
    told.loaded(request, load(b"b", b"c", b"d"))
    told.begun(request, 4 * CHUNK)
    trace = request.trace
    assert (trace.loaded_at, [report.tier for report in trace.reports]) == (100.5, ["dram", "remote"])
