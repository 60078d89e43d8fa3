"""Tuners within the agent's loop: what they read of history, and what becomes of their wishes."""

from datetime import timedelta
from unittest.mock import Mock

import pytest

from agent.agents import POLICY, answer, pass_windows
from agent.fakes import DIGEST, SLOW, START, costs, fetch
from tiertune_agent.changes.control import Refused
from tiertune_agent.fields import replaced
from tiertune_agent.history.database import DatabaseError
from tiertune_agent.records import Prospect, State

pytestmark = pytest.mark.slow

NOW = f"{1 << 30}/0/0"
POOL = {"namespace": DIGEST, "model": "llama"}


def test_a_pool_changes_its_algorithm_when_the_ghosts_say_so(agent, store, rounds, policy_file):
    """Ghosts that the store counts without a tier are read with the pool's windows; on auto the store is changed."""
    policy_file.write_text(POLICY.replace("tuners: {", "tuners: {eviction: {mode: auto, period: 1m}, "))
    for index in range(9):
        store.count("tier_evictions_total", 5.0, tier="dram", algorithm="lru", reason="room", **POOL)
        for algorithm, hit in (("lru", 200), ("arc", 400), ("s3fifo", 300)):
            store.simulate(algorithm, hit + index)
        rounds(1)
    assert store.tuning["pools"][DIGEST]["dram"]["eviction"] == "arc"
    (decision,) = agent.history.decisions.find()
    assert "arc would hit 40.1% of the tokens against 20.1% of lru, +20.00 points" in decision.reason


def test_ghosts_of_a_few_requests_change_no_pool(agent, store, rounds, policy_file):
    """However much more an algorithm would have hit of these: the guard asks for 500 requests."""
    eviction = POLICY.replace("tuners: {", "tuners: {eviction: {mode: auto, period: 1m}, ")
    policy_file.write_text(eviction.replace("min_requests: 1", "min_requests: 500"))
    for _ in range(5):
        store.count("requests_total", 10.0, salted="no", **POOL)
        for algorithm, hit in (("lru", 200), ("arc", 400)):
            store.simulate(algorithm, hit)
        rounds(1)
    assert agent.history.decisions.find() == []
    assert answer(agent, "eviction")["reason"].startswith("too little evidence: 50 requests, the guard asks for 500")


def test_tuners_whose_answers_were_lost_are_asked_again(agent, clock, monkeypatch):
    """The database was away when they were to be written: nobody waits a period for what nobody can read."""
    agent.leader.leads()
    with monkeypatch.context() as patch:
        patch.setattr(agent.history.answers, "remember", Mock(side_effect=DatabaseError("gone")))
        with pytest.raises(DatabaseError):
            agent.loop.run_once()
    clock.advance(15)
    agent.loop.run_once()
    assert {"remote_fetch", "tier_size", "eviction"} <= {one["tuner"] for one in agent.history.answers.newest()}


@pytest.mark.parametrize(("bandwidth", "ends"), [(1e9, "on"), (1e8, "off")])
def test_fetching_that_no_history_knows_of_goes_on_by_the_prompts_of_late(agents, store, clock, bandwidth, ends):
    """Off, in a new database: no request can find chunks there, so its prompts at the engines' own line decide."""
    store.tuning["tiers"]["remote"]["fetch"], store.bandwidth = "off", bandwidth
    line = {"overhead_s": 0.0, "seconds_per_flop": 5e-4, "params": 0.5, "layers": 0, "width": 0, "step_tokens": 0}
    more, agent = {"chunk_tokens": 16, "prefill": line}, agents()
    store.tells("get_status", lambda told: replaced(told, f"pools.{DIGEST}", told["pools"][DIGEST] | more))
    for requests in (0, 0, 0, 10):
        store.count("requests_total", requests, salted="no", **POOL)
        pass_windows(agent, store, clock, 1, requests)
        told = next(one["reason"] for one in agent.history.answers.newest() if one["tuner"] == "remote_fetch")
        assert requests or "nobody told what computing one takes" in told or "no window has passed" in told
    assert fetch(store) == ends
    assert "a mean prompt (62.0 MiB; none was found there of late) would take" in told


def test_fetching_that_was_off_for_long_comes_on_by_what_requests_found_before(agent, store, clock, rounds):
    """No window of then is left; the agent still knows what a request found, and probes tell what it would take now."""
    store.bandwidth = SLOW
    rounds(12)
    assert fetch(store) == "off"
    for _ in range(3):
        clock.advance(5 * 86400)
        rounds(1, 0)
        agent.history.retention.sum_up(clock.now())
        agent.history.retention.prune(clock.now(), timedelta(hours=6))
    assert not any(window.values.get("gate_candidate_requests_total") for window in remote_windows(agent))
    store.bandwidth = 1e9
    rounds(6, 0)
    assert fetch(store) == "on"
    assert "a typical candidate (95.4 MiB) would take" in agent.history.decisions.find()[0].reason


@pytest.mark.parametrize("token_s", [5e-2, 5e-4])
def test_what_requests_found_before_is_no_measure_of_another_model(agent, store, clock, rounds, token_s):
    """Off as fetching did not pay for a small model; then the host serves a large one, or has another GPU."""
    store.bandwidth = SLOW
    rounds(12)
    line = {"overhead_s": 0.0, "seconds_per_flop": token_s, "params": 0.5, "layers": 0, "width": 0, "step_tokens": 0}
    more = {"chunk_tokens": 16, "prefill": line}
    store.tells("get_status", lambda told: replaced(told, f"pools.{DIGEST}", told["pools"][DIGEST] | more))
    for days, said in ((0, "a typical candidate (95.4 MiB) would take"), (1, "a mean prompt (62.0 MiB; ")):
        clock.advance(86400 * days)
        agent.loop.run_once()
        for _ in range(4):
            store.count("requests_total", 10, salted="no", **POOL)
            pass_windows(agent, store, clock, 1, 10)
            if fetch(store) == "on":
                break
        assert said in answer(agent)["reason"]
    assert fetch(store) == ("on" if token_s > 1e-3 else "off")


def remote_windows(agent):
    return agent.history.measured.windows("host-a", tier="remote")


def test_a_refused_wish_ends_no_wish_of_another_setting(agent, rounds, policy_file):
    """Somebody rejects the margin that the policy names: the floor that it named before still waits for approval."""
    for named in ("min_fetch_tokens: 4096", "min_fetch_tokens: 4096, margin: 2.5"):
        wishes = POLICY.replace("mode: auto", f"mode: recommend, {named}")
        policy_file.write_text(wishes)
        rounds(1)
    margin, floor = agent.history.decisions.in_state(State.PROPOSED)
    assert (margin.field, floor.field) == ("tiers.remote.margin", "tiers.remote.min_fetch_tokens")
    agent.changes.reject(margin.id, "anna")
    rounds(2)
    assert [one.id for one in agent.history.decisions.in_state(State.PROPOSED)] == [floor.id]


def test_a_lower_floor_in_the_policy_is_followed_as_a_higher_one(store, rounds, policy_file):
    """Also the margin that is changed with it: nobody waits for a day for what the policy itself had set."""
    for named, floor in (("8192", 8192), ("512", 512), ("256, margin: 1.3", 256)):
        policy_file.write_text(POLICY.replace("mode: auto", f"mode: auto, min_fetch_tokens: {named}"))
        rounds(6)
        assert store.tuning["tiers"]["remote"]["min_fetch_tokens"] == floor


@pytest.mark.parametrize("most_and_end_gib", [(3, 0.5), (9, 5)])
def test_a_size_is_chosen_from_what_the_policy_allows(agent, store, rounds, policy_file, most_and_end_gib):
    """Only 8 GiB would be quicker: where they are forbidden DRAM that serves nobody shrinks, by its step."""
    most_gib, end_gib = most_and_end_gib
    sized = f"tuners: {{tier_size: {{mode: auto, period: 5m, max: {{dram: {most_gib}GiB}}}}, "
    policy_file.write_text(POLICY.replace("tuners: {", sized) + "prices: {gpu_hour: 1, dram_gib_month: 100}\n")
    told = costs({0: 1.0, 1: 1.0, 2: 1.0, 4: 1.0, 8: 0.1})
    now = store.clock.now()
    seen = [Prospect(DIGEST, now - timedelta(seconds=75 * index), 75.0, 500, told) for index in range(5)]
    agent.history.measured.remember_prospects(seen[::-1])
    rounds(5)
    assert store.tuning["tiers"]["dram"]["capacity_bytes"] == end_gib * (1 << 30)


@pytest.mark.parametrize("before", [{}, {DIGEST: {"model": "", "disk": {"effective": {"capacity_bytes": 1 << 30}}}}])
def test_a_host_is_sized_for_the_models_that_it_serves(agents, store, other, *, clock, policy_file, before):
    """One model would be quicker with 4 GiB, the other gains nothing: each host follows its own.

    Also where its disk still holds what it served ``before`` a restart.
    """
    qwen = "cd" * 16
    other.tells("get_status", lambda told: told | {"pools": before | {qwen: told["pools"][DIGEST]}})
    sized = "tuners: {tier_size: {mode: auto, period: 5m, max_step: 1.0}, "
    policy_file.write_text(POLICY.replace("tuners: {", sized) + "prices: {gpu_hour: 1, dram_gib_month: 100}\n")
    agent, now = agents(store, other), clock.now()
    quick = costs({0: 2.0, 1: 1.0, 2: 0.7, 4: 0.1})
    agent.history.measured.remember_prospects(
        Prospect(digest, now - timedelta(seconds=75 * index), 75.0, 500, told)
        for index in range(5, 0, -1)
        for digest, told in ((DIGEST, quick), (qwen, dict.fromkeys(quick, 1.0)))
    )
    for _ in range(2):
        agent.loop.run_once()
        clock.advance(15)
    assert [each.tuning["tiers"]["dram"]["capacity_bytes"] >> 30 for each in (store, other)] == [4, 0]


@pytest.fixture
def advised(agents, store, other):
    """An agent over two stores whose samples say that routing by prefix would halve the time to the first token."""
    agent = agents(store, other)
    agent.history.measured.remember_prospects(
        Prospect(DIGEST, START - timedelta(seconds=300 * index), 300.0, 200, {NOW: 1.0, f"{NOW}@prefix": 0.5})
        for index in range(5)
    )
    agent.loop.run_once()
    return agent


def test_advice_is_one_proposal_of_the_fleet(advised):
    """Two stores, one row; it stays a proposal, and there is an answer for everything else that was asked."""
    (decision,) = [each for each in advised.history.decisions.find() if each.tuner == "routing"]
    assert (decision.state, decision.target.store) == ("proposed", "fleet")
    assert (decision.field, decision.before, decision.after) == ("advice.routing", "as it is", "by prefix")
    assert "would cut the mean time to the first token by 50.0%" in decision.reason
    answers = {answer["tuner"]: answer["reason"] for answer in advised.history.answers.newest()}
    assert "no samples tell yet what no remote tier would cost" in answers["sharing"]
    assert "no GPU has told" in answers["balance"]


def test_advice_cannot_be_approved_but_rejected(advised):
    """There is no knob: an approval is refused and says what to do; a rejection closes it."""
    (decision,) = [each for each in advised.history.decisions.find() if each.tuner == "routing"]
    with pytest.raises(Refused, match="is advice: routing is not TierTune's to change; follow it by hand, or reject"):
        advised.changes.approve(decision.id, "local")
    assert advised.history.decisions.get(decision.id).state == "proposed"
    assert advised.changes.reject(decision.id, "local").state == "rejected"


def test_advice_on_a_namespace_that_is_gone_ends(advised, store, other, clock):
    """New weights are another namespace: what was advised of the old one is nobody's to follow any more."""
    (decision,) = advised.history.decisions.in_state(State.PROPOSED)
    for each in (store, other):
        each.tells("get_status", lambda told: told | {"pools": {"cd" * 16: told["pools"][DIGEST]}})
    for state in ("proposed", "expired"):
        pass_windows(advised, (store, other), clock, 2, seconds=1805)
        assert advised.history.decisions.get(decision.id).state == state
