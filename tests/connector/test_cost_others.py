"""What a choice costs the others."""

from tiertune_connector.cost import ALONE, FetchEstimate, Others, decide


def cut(others, *, queue_s=0.0, backlog_s=0.0, prefill=lambda h, n: 0.00015 * (n - h)):
    """Ten chunks of 100 tokens and 10 kB lie remotely; recomputing one takes 15 ms, fetching one 11."""
    return decide(
        ["remote"] * 10,
        computed_tokens=0,
        prompt_tokens=1001,
        chunk_tokens=100,
        chunk_bytes=10_000,
        fetch={"remote": FetchEstimate(0.01, 0.001, 1e6, queue_s)},
        prefill=prefill,
        settings={},
        backlog_s=backlog_s,
        others=others,
    ).cut


def test_alone_a_request_pays_its_own_seconds():
    """Nothing is changed where nobody waits."""
    assert (ALONE.prefill_price, ALONE.transfer_price) == (1.0, 1.0)


def test_everybody_behind_pays_for_a_prefill_and_half_of_them_for_a_transfer():
    """The other half wait for their engines anyway."""
    assert Others(prefills=3).prefill_price == 4.0
    assert Others(transfers=3).transfer_price == 2.5


def test_an_unknown_prefill_stays_unknown():
    """There is no price of what nobody knows."""
    assert cut(Others(prefills=3), prefill=lambda _h, _n: None) == 0


def test_a_loaded_link_is_spared_and_a_loaded_engine_is_relieved():
    """The same chunks are fetched by a request alone, not over a crowded link, and again for a crowded engine."""
    assert cut(ALONE) == 10
    assert cut(Others(transfers=2)) == 0
    assert cut(Others(prefills=3, transfers=2)) == 10


def test_what_a_transfer_waits_itself_has_no_price():
    """Behind a queue that the backlog hides, a fetch is as dear over a crowded link as without the queue."""
    crowded = Others(prefills=3, transfers=6)
    assert cut(crowded, queue_s=3.0, backlog_s=3.0) == cut(crowded) == 10
