"""What a choice costs the others."""

import pytest

from tiertune_connector.cost import FetchEstimate, Others, decide

ESTIMATE = FetchEstimate(0.01, 0.001, 1e6, queue_s=3.0)


def cut(others, backlog_s=0.0):
    """Ten chunks of 100 tokens and 10 kB lie remotely; recomputing one takes 15 ms, fetching one 11."""
    return decide(
        ["remote"] * 10,
        computed_tokens=0,
        prompt_tokens=1001,
        chunk_tokens=100,
        chunk_bytes=10_000,
        fetch={"remote": others.fetch(FetchEstimate(0.01, 0.001, 1e6))},
        prefill=others.prefill(lambda h, n: 0.00015 * (n - h)),
        settings={},
        backlog_s=backlog_s,
    ).cut


def test_alone_a_request_pays_its_own_seconds():
    """Nothing is changed where nobody waits."""
    assert Others().fetch(ESTIMATE) == ESTIMATE
    assert Others().prefill(lambda h, n: float(n - h))(3, 10) == 7.0


def test_those_behind_pay_for_a_transfer_and_not_for_its_wait():
    """Two transfers ahead stand for one request that will be held up: all of a fetch is twice as dear but the queue."""
    priced = Others(transfers=2).fetch(ESTIMATE)
    own_s = ESTIMATE.seconds(4, 4_000_000) - 3.0
    assert priced.seconds(4, 4_000_000) - 3.0 == pytest.approx(2 * own_s)


def test_an_unknown_prefill_stays_unknown():
    """There is no price of what nobody knows."""
    assert Others(prefills=3).prefill(lambda _h, _n: None)(0, 10) is None


def test_a_loaded_link_is_spared_and_a_loaded_engine_is_relieved():
    """The same chunks are fetched by a request alone, not over a crowded link, and again for a crowded engine."""
    assert cut(Others()) == 10
    assert cut(Others(transfers=2)) == 0
    assert cut(Others(prefills=3, transfers=2)) == 10
