"""A request that is traced, and what takes its spans."""

from tiertune_connector.cost import Candidate, GateDecision, Reason
from tiertune_connector.protocol.messages import TierReport

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = {"traceparent": f"00-{TRACE}-{CALLER}-01"}, {"traceparent": f"00-{TRACE}-{CALLER}-00"}
CHUNKS = {"chunk_bytes": 1000}
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


def fetched_request(tracing, headers=SAMPLED, request="r1"):
    """Arrives at second 101 of its clock; each event comes a second later."""
    tracing.arrived(request, headers, 1300, 10)
    tracing.looked_up(request, ["dram"] * 5 + ["remote"] * 5)
    tracing.decided(request, FETCH)
    tracing.loaded(request, [report("dram", "won", actual_s=0.25), report("remote", "lost", chunks=5, actual_s=0.5)])
    tracing.finished(request)
