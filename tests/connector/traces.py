"""A request that is traced, and what takes its spans."""

from tiertune_connector.cost import Candidate, GateDecision, Reason
from tiertune_connector.protocol.messages import TierReport
from tiertune_connector.tracing import RequestTrace

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01"}, {"traceparent": f"00-{TRACE}-{CALLER}-00"}
CHUNKS = {"chunk_bytes": 1000}
SECOND = 10**9
FETCH = GateDecision(
    10,
    "remote",
    Reason.CHEAPER,
    0.2,
    0.9,
    (
        Candidate("dram", 3, 3, Reason.CHEAPER, 0.05, 0.3),
        Candidate("remote", 5, 5, Reason.CHEAPER, 0.15, 0.6),
    ),
    backlog_s=0.04,
)


def report(tier, outcome, *, chunks=3, fetched=None, actual_s=0.1, vain=0):
    fetched = chunks if fetched is None else fetched
    tokens = chunks * 128, fetched * 128
    return TierReport(tier, chunks, *tokens, "cheaper", 0.05, 0.3, actual_s, outcome, vain_tokens=vain * 128)


class Sink:
    """Keeps what spans are to be made of."""

    def __init__(self):
        self.traces, self.closed = [], False

    def make(self, trace):
        self.traces.append(trace)

    def close(self):
        self.closed = True


def fetched(request="r1", headers=SAMPLED, **told):
    """Of a request that arrives at second 101; each event comes a second later."""
    usual = {
        "looked_up_at": 2.0,
        "tiers": ["dram"] * 5 + ["remote"] * 5,
        "decided_at": 3.0,
        "decision": FETCH,
        "loaded_at": 4.0,
        "reports": [report("dram", "won", actual_s=0.25), report("remote", "lost", chunks=5, actual_s=0.5)],
    }
    return RequestTrace(request, headers, 1300, 10, 1.0, 101 * SECOND, **(usual | told))
