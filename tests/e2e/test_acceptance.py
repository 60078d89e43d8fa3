"""The acceptance in its short form: every claim holds, on real stores, a real Redis and a real agent."""

import json
from unittest.mock import Mock

import pytest

from acceptance.__main__ import main
from acceptance.claims import CLAIMS, Claim, proved
from acceptance.fleet import NotShownError
from acceptance.regret import Fetch, Regret, Standing, recorded, regret
from acceptance.sizes import BUDGET_BYTES, CHUNK_BYTES, judged
from acceptance.traffic import Phase, shifting
from e2e.servers import program
from tiertune_agent.demo.world import HOSTS, Setup
from tiertune_agent.replay.engine import OVERHEAD_S

SETUP = Setup(
    chunk_bytes=CHUNK_BYTES,
    dram_bytes=BUDGET_BYTES // 4,
    remote_bytes=BUDGET_BYTES // 2,
    prefill_step_s=OVERHEAD_S,
    prefill_chunk_s=0.01,
)
ALL_DRAM = ([BUDGET_BYTES // 2] * len(HOSTS), 0)
ALL_REMOTE = ([0] * len(HOSTS), BUDGET_BYTES)


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_claim_holds(tmp_path, capsys):
    """Exit status 0, and a sentence of evidence for each claim, in the result too."""
    program("redis-server")
    out = tmp_path / "acceptance.json"
    assert main(["--short", "--json", str(out)]) == 0, capsys.readouterr().out
    document = json.loads(out.read_text())
    assert {claim["claim"] for claim in document["claims"]} == set(CLAIMS)
    assert all(claim["holds"] and claim["evidence"] for claim in document["claims"])


@pytest.mark.parametrize("error", [NotShownError("it went wrong"), ValueError("it went wrong")])
def test_what_goes_wrong_is_what_a_claim_lacks(monkeypatch, error):
    """A claim that fails, by its own word or by a mistake, does not hold, and the others can still be proved."""
    monkeypatch.setattr("acceptance.claims.CLAIMS", {"it": Claim("it works", Mock(side_effect=error))})
    proof = proved("it", short=True)
    assert not proof.holds
    assert "it went wrong" in proof.evidence


def test_without_redis_it_says_what_to_install(monkeypatch, capsys):
    """Status 2, and the package's name."""
    monkeypatch.setenv("PATH", "")
    assert main([]) == 2
    assert "apt-get install redis-server" in capsys.readouterr().err


def test_where_its_result_cannot_be_written_is_told_first(monkeypatch, tmp_path, capsys):
    """Status 2, before the eleven minutes and not after them."""
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("acceptance.__main__.proofs", Mock(side_effect=AssertionError("proved")))
    for path in (tmp_path, tmp_path / "none" / "it.json"):
        assert main(["--json", str(path)]) == 2
        assert str(path) in capsys.readouterr().err


def journals(folder, trace):
    """As two players of two hosts write them, each request in its turn; a second round begins at the end."""
    paths = [folder / f"{number}.journal" for number in range(2)]
    for number, path in enumerate(paths):
        lines = [f"{1000 + trace.t[row]} 0-{row}" for row in range(number, len(trace), 2)]
        path.write_text("\n".join([*lines, f"{2000 + number} 1-{number}"]) + "\n")
    return paths


@pytest.fixture
def traffic(tmp_path):
    trace = shifting([Phase(200, 8), Phase(200, 40)], 10.0, seed=1)
    return recorded(trace, journals(tmp_path, trace))


def test_what_was_recorded_is_what_was_served(traffic):
    """All requests of the first round in the order of time, and at which host each was."""
    trace = shifting([Phase(200, 8), Phase(200, 40)], 10.0, seed=1)
    assert traffic.trace.chains == trace.chains
    assert traffic.hosts == [0, 1] * 200
    assert traffic.trace.t[0] == 1000


def test_a_split_that_stands_still_has_its_own_regret(traffic):
    """The best split has none, the worst as much as the seven splits tell."""
    begin = float(traffic.trace.t[0])
    for sizes, share in ((ALL_DRAM, 0.0), (ALL_REMOTE, 0.99)):
        found = regret(traffic, SETUP, [Standing(begin, *sizes)], fetches=[Fetch(begin, 0.001, 0.002)], period_s=4.0)
        assert found.ttft_s == pytest.approx(found.by_share[share], rel=0.02)
        assert found.share == pytest.approx(found.by_share[share] / min(found.by_share.values()) - 1, abs=0.02)


def test_sizes_that_follow_the_traffic_have_less_regret_than_any_that_stand_still(traffic):
    """DRAM for few documents, then remote for many: better than the best of the seven splits."""
    begin, turn = float(traffic.trace.t[0]), float(traffic.trace.t[200])
    followed = regret(
        traffic,
        SETUP,
        [Standing(begin, *ALL_DRAM), Standing(turn, *ALL_REMOTE)],
        fetches=[Fetch(begin, 0.001, 0.001)],
        period_s=4.0,
    )
    assert followed.share < 0


def test_a_fetch_costs_what_it_did_at_the_time(traffic):
    """To do without the remote was right while fetches took as long as computing, also if they do no longer at last."""
    begin, end = float(traffic.trace.t[0]), float(traffic.trace.t[-1])
    dear, cheap = Fetch(begin, 0.001, 0.009), Fetch(end - 2, 0.001, 0.001)
    still = [Standing(begin, *ALL_DRAM)]
    first, both, last = (
        regret(traffic, SETUP, still, fetches=fetches, period_s=4.0).share
        for fetches in ([dear], [dear, cheap], [cheap])
    )
    assert both == pytest.approx(first, abs=0.02)
    assert both < 0.02
    assert last > 0.1


def test_sizes_that_stay_where_it_is_dear_are_no_proof(traffic):
    """Also if both kinds together cost little; to go is one, and to stay where it is cheap, or where time is short."""
    begin, turn = float(traffic.trace.t[0]), float(traffic.trace.t[traffic.turn])
    still, then = Standing(begin, *ALL_DRAM), Standing(turn + 1, *ALL_REMOTE)
    dear, cheap = (Regret(200, 1.0, {0.0: 1.0, 0.99: 1.0}, {0.0: stay, 0.99: 1.0}) for stay in (1.2, 1.05))
    with pytest.raises(NotShownError, match="to stay would have taken 20% more"):
        judged(dear, traffic, [still], changes=1, verified=1, must_follow=True)
    assert judged(dear, traffic, [still], changes=1, verified=1, must_follow=False)
    for found, stood in ((dear, [still, then]), (cheap, [still])):
        assert "all 1 chunks" in judged(found, traffic, stood, changes=1, verified=1, must_follow=True)
    with pytest.raises(NotShownError):
        judged(cheap, traffic, [still], changes=0, verified=1, must_follow=False)


def test_what_it_costs_to_stay_is_told_of_the_traffic_after_the_turn(traffic):
    """DRAM alone is best while few documents are asked about, and dear when they have become many."""
    begin = float(traffic.trace.t[0])
    still = [Standing(begin, *ALL_DRAM)]
    found = regret(traffic, SETUP, still, fetches=[Fetch(begin, 0.001, 0.001)], period_s=4.0)
    assert traffic.turn == 200
    assert found.to_stay(0.02) == found.to_stay(0.0) > 0.2
    assert found.to_stay(0.99) == pytest.approx(0.0, abs=0.05)
