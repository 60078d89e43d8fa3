"""A bypass that stores have not acknowledged: all are told at once, and the last wish stands."""

import json
import threading

import httpx
import pytest
from sqlalchemy import event

from agent.agents import pass_windows
from agent.fakes import FakeStore
from agent.test_history_at_once import meanwhile
from tiertune_agent.changes.operators import Caller

pytestmark = pytest.mark.slow

CALLER = Caller("anna", "10.0.0.9")
PATIENCE_S = 10.0
"""Only a failing test waits for so long."""


@pytest.fixture
def healthy(clock):
    return FakeStore(clock, name="z-healthy")


@pytest.fixture
def hung(clock):
    return [FakeStore(clock, name=f"hung-{number}") for number in range(6)]


@pytest.fixture
def agent(agents, hung, healthy):
    made = agents(*hung, healthy)
    made.tick()
    return made


@pytest.fixture
def hang(hung, healthy):
    """The six answer nothing, until the healthy one was told; who of them saw that."""
    told, seen = threading.Event(), []
    answer = healthy.post_bypass

    def tell(request):
        told.set()
        return answer(request)

    def wait(request):
        seen.append(told.wait(PATIENCE_S))
        raise httpx.ReadTimeout("no answer", request=request)

    healthy.post_bypass = tell
    for store in hung:
        store.post_bypass = wait
    return seen


def test_hung_stores_do_not_delay_a_healthy_one(agent, hung, healthy, hang):
    """While none of six has answered yet, the seventh is told and acknowledges; they are told again next time."""
    outcomes = agent.operators.bypass(CALLER, True, None)["stores"]
    assert hang == [True] * 6
    assert (healthy.bypass, outcomes.pop("z-healthy")) == (True, "ok")
    assert set(outcomes.values()) == {"no store answers: no answer"}
    pending = {store.name: store.pending_bypass for store in agent.history.stores()}
    assert pending == {store.name: True for store in hung} | {"z-healthy": None}


def test_nor_one_that_never_answered_before(agents, hung, healthy, hang):
    """Stores that history does not know are told with the others."""
    agent = agents(*hung, healthy)
    agent.operators.bypass(CALLER, True, None)
    assert (hang, healthy.bypass) == ([True] * 6, True)
    healthy.bypass = False
    hang.clear()
    agent.operators.deliver()
    assert (len(hang), healthy.bypass) == (6, False)  # it has acknowledged, and is left alone


def test_a_silent_store_of_one_delivery_holds_up_no_other_store_of_the_next(agent, hung, healthy):
    """While a round waits for its answer, the rest hears that bypass is off; it hears that, too, after the round's."""
    heard, asked, told, answer = [], threading.Event(), threading.Event(), healthy.post_bypass

    def wait(request):
        asked.set()
        heard.append((json.loads(request.content)["on"], told.wait(PATIENCE_S)))
        raise httpx.ReadTimeout("no answer", request=request)

    def tell(request):
        told.set()
        return answer(request)

    hung[0].post_bypass, healthy.post_bypass = wait, tell
    agent.history.wish_bypass({"hung-0": "http://hung-0:7410"}, on=True)
    first = threading.Thread(target=agent.operators.deliver)
    first.start()
    assert asked.wait(PATIENCE_S)
    outcomes = agent.operators.bypass(CALLER, False, None)["stores"]
    first.join(PATIENCE_S)
    assert heard == [(True, True), (False, True)]
    assert {name for name, outcome in outcomes.items() if outcome != "ok"} == {"hung-0"}
    assert len(outcomes) == 7


def test_a_bypass_of_many_takes_no_transaction_for_each(agent):
    """In an emergency hundreds of stores wait for the first to be told, and each commit waits for the disk."""
    commits = []
    event.listen(agent.history._engine, "commit", commits.append)

    def counted(which):
        commits.clear()
        agent.operators.bypass(CALLER, True, which)
        return len(commits)

    one = counted("z-healthy")
    assert counted(None) < one + len(agent.history.stores()) - 1


def test_a_bypass_of_one_store_is_told_to_no_other(agent, hung, healthy):
    """Neither now nor with the next window."""
    assert agent.operators.bypass(CALLER, True, "z-healthy")["stores"] == {"z-healthy": "ok"}
    assert agent.operators.deliver() == {}
    assert [store.bypass for store in (healthy, *hung)] == [True] + [False] * 6


@pytest.mark.parametrize("known", [True, False])
def test_a_wish_that_came_meanwhile_stays(agents, store, known):
    """Bypass is switched off while a round still tells the store that it is on: off comes after it."""
    agent, answer = agents(), store.post_bypass
    if known:
        agent.tick()
    operators, wished = agent.operators, threading.Event()
    deliver, off = operators.deliver, threading.Thread(target=lambda: operators.bypass(CALLER, False, None))

    def first(request):
        """The answer to on is given after off was commanded."""
        store.post_bypass = answer
        operators.deliver = lambda names: (wished.set(), deliver(names))[1]
        off.start()
        assert wished.wait(PATIENCE_S)
        return answer(request)

    store.post_bypass = first
    assert set(operators.bypass(CALLER, True, None)["stores"].values()) == {"ok"}
    off.join(PATIENCE_S)
    assert store.bypass is False
    assert [one.pending_bypass for one in agent.history.stores()] == [None] * known


def test_of_two_bypasses_at_once_one_stands_for_all_stores(agent, hung, healthy, monkeypatch):
    """Off is commanded while on is being wished: no part of the fleet stays bypassed."""
    wish, ended, operators = agent.history.wish_bypass, threading.Event(), agent.operators
    off = threading.Thread(target=lambda: (operators.bypass(CALLER, False, None), ended.set()))

    def slow(stores, *, on):
        if on:
            off.start()
            ended.wait(0.2)  # for ever, if it waits for its turn
        wish(stores, on=on)

    monkeypatch.setattr(agent.history, "wish_bypass", slow)
    operators.bypass(CALLER, True, None)
    off.join(PATIENCE_S)
    assert [store.bypass for store in (*hung, healthy)] == [False] * 7
    assert {store.pending_bypass for store in agent.history.stores()} == {None}


def test_a_store_that_came_back_under_another_name_hears_it(agents, store):
    """Its host was set up anew while it was away: the wish was for whoever serves there."""
    agent = agents()
    agent.tick()
    store.up = False
    agent.operators.bypass(CALLER, True, None)
    store.up, store.name = True, "host-a-again"
    store.restart()
    pass_windows(agent, store, store.clock, 2, tick=True)
    assert store.bypass
    assert agent.history.wishes(["http://host-a:7410"]) == {}
    assert [(one.name, one.pending_bypass) for one in agent.history.stores()] == [("host-a-again", None)]


def test_whoever_is_met_at_its_address_meanwhile_hears_it(agents, store):
    """A round finds another name at the address just before the bypass is written down."""
    agent = agents()
    agent.tick()
    store.name = "host-a-again"
    store.restart()
    met = meanwhile(agent.history, "stores", lambda: pass_windows(agent, store, store.clock, tick=True))
    agent.operators.bypass(CALLER, True, "host-a")
    assert met
    pass_windows(agent, store, store.clock, tick=True)
    assert store.bypass
    assert agent.history.wishes(["http://host-a:7410"]) == {}
    assert {one.name: one.pending_bypass for one in agent.history.stores()} == {"host-a-again": None}


def test_a_bypass_of_all_holds_for_those_to_come(agents, clock, listed):
    """A new store hears that it is on; one that was away for the lifting hears of that when it is back."""
    away, *_ = stores = [FakeStore(clock, name) for name in ("away", "there", "new")]
    agent = agents(*stores, stores=(), stores_file=listed("away", "there"))

    def bypass(on, *names):
        agent.operators.bypass(CALLER, on, None)
        listed(*names)
        clock.advance(15)
        agent.tick()

    agent.tick()
    away.up = False
    bypass(True, "there", "new")
    assert [store.bypass for store in stores] == [False, True, True]
    away.up = away.bypass = True
    bypass(False, "there", "away")
    assert not any(store.bypass for store in stores)
    assert agent.history.wishes(["fleet"]) == {}


@pytest.mark.parametrize("heard", [True, False], ids=["seen bypassed", "not seen since it was told"])
def test_a_store_that_lost_its_state_hears_of_a_bypass_of_all_again(agents, store, clock, heard):
    """It begins anew under its name, as a host does that was installed again: it is new, and that it is on holds."""
    agent, before = agents(), store.tuning
    agent.tick()

    def lose():
        store.restart()
        store.tuning, store.bypass = before, False
        pass_windows(agent, store, clock, 2, tick=True)

    agent.operators.bypass(CALLER, True, None)
    if heard:
        pass_windows(agent, store, clock, tick=True)
    lose()
    assert store.bypass
    agent.operators.bypass(CALLER, False, None)
    lose()
    assert not store.bypass


def test_a_bypass_of_one_store_is_not_for_who_lost_its_state(agents, store, clock):
    """That was told to the store that is gone."""
    agent, before = agents(), store.tuning
    agent.tick()
    agent.operators.bypass(CALLER, True, "host-a")
    pass_windows(agent, store, clock, tick=True)
    store.restart()
    store.tuning, store.bypass = before, False
    pass_windows(agent, store, clock, 2, tick=True)
    assert not store.bypass


@pytest.mark.parametrize("restarted", [True, False])
def test_a_bypass_that_was_lifted_at_a_store_is_for_no_new_one(agents, clock, listed, restarted):
    """It is lifted there past the agent, as while none runs; the store keeps that, also over a restart."""
    there, new = stores = [FakeStore(clock, name) for name in ("there", "new")]
    agent = agents(*stores, stores=(), stores_file=listed("there"))
    agent.tick()
    agent.operators.bypass(CALLER, True, None)
    pass_windows(agent, there, clock, tick=True)
    there.post_bypass(httpx.Request("POST", "http://there:7410/v1/bypass", json={"on": False}))
    if restarted:
        there.restart()
    pass_windows(agent, there, clock, tick=True)
    listed("there", "new")
    pass_windows(agent, stores, clock, 2, tick=True)
    assert (there.bypass, new.bypass) == (False, False)
    assert agent.history.wishes(["fleet"]) == {}


@pytest.mark.parametrize("on", [True, False])
def test_a_store_that_is_met_while_all_are_bypassed_hears_of_it(agents, clock, listed, on):
    """It is listed, and answers for the first time, after the command began, and before it is known to be for all."""
    there, new = stores = [FakeStore(clock, name) for name in ("there", "new")]
    agent = agents(*stores, stores=(), stores_file=listed("there"))
    agent.tick()
    if not on:
        agent.operators.bypass(CALLER, True, None)

    def meet():
        listed("there", "new")
        pass_windows(agent, stores, clock, tick=True)

    met = meanwhile(agent.history, "stores", meet)
    agent.operators.bypass(CALLER, on, None)
    assert met
    assert (there.bypass, new.bypass) == (on, on)


def test_who_gets_the_address_of_one_that_left_hears_no_wish_for_it(agents, clock, listed):
    """All were bypassed while it was away, and the address is another store's by the time that bypass was lifted."""
    gone, there = FakeStore(clock, "gone"), FakeStore(clock, "there")
    agent = agents(gone, there, stores=(), stores_file=listed("gone", "there"))

    def rounds(*names):
        listed(*names)
        clock.advance(15)
        agent.tick()

    agent.tick()
    rounds("there")
    agent.operators.bypass(CALLER, True, None)
    agent.operators.bypass(CALLER, False, "there")
    gone.name = "new"
    for _ in range(2):
        rounds("there", "gone")
    assert not gone.bypass


@pytest.mark.parametrize("on", [True, False])
def test_of_two_wishes_that_differ_bypass_stands(agents, store, on):
    """One of the store, one of whoever is at its address: it is told one of them, and the other is gone."""
    agent, told, answer = agents(), [], store.post_bypass
    agent.tick()
    agent.history.wish_bypass({"host-a": "http://host-a:7410"}, on=on)
    agent.history.wish_bypass({"new": "http://host-a:7410"}, on=not on)

    def hear(request):
        told.append(request.content)
        return answer(request)

    store.post_bypass = hear
    assert agent.operators.deliver() == {"host-a": "ok"}
    assert agent.operators.deliver() == {}
    assert (store.bypass, len(told)) == (True, 1)
    assert agent.history.wishes(["http://host-a:7410"]) == {}
    assert [(one.pending_bypass, one.tuning["bypass"]) for one in agent.history.stores()] == [(None, True)]
