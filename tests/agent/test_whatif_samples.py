"""Samples that do not come as they should, from stores that restart, are away or tell nonsense."""

import json
import re

import pytest

from agent.whatif_fleet import NOW, Fleet, begun, conversations, exact_cost
from tiertune_agent.collector.samples import PAGES_S
from tiertune_connector.sampling.observer import Sampling

pytestmark = pytest.mark.slow


def test_samples_that_were_pushed_out_are_counted():
    """The ring is bounded; what was missed is told, and the prospect is of all requests by ratio."""
    fleet, requests = begun(5000, hosts=1)
    (prospect,) = fleet.told(requests)
    chunks = sum(len(keys) for _, keys in requests)
    assert fleet.reader.missed == chunks - 32_768 > 0
    assert prospect.requests == 5000
    assert prospect.costs[str(NOW)] == pytest.approx(exact_cost(requests, NOW, 1), rel=0.1)
    fleet.round()
    assert fleet.reader.missed == chunks - 32_768


def test_a_store_that_is_new_is_asked_once():
    """What it tells first is all that it has: as many as its ring holds need not be sent twice."""
    fleet, asked = Fleet(hosts=1), []
    fleet.play(conversations(300, hosts=1))
    read = fleet.hosts[0].samples
    fleet.hosts[0].samples = lambda since: asked.append(since) or read(since)
    fleet.round()
    assert asked == [0]


def test_a_store_that_is_slow_is_read_on_in_the_next_round():
    """Its samples come page by page: not all of them hold a round up, and none is lost."""
    fleet, requests = begun(3000, hosts=1)
    fleet.play(requests)
    host, asked = fleet.hosts[0], []
    read = host.samples

    def slow(since):
        asked.append(since)
        fleet.now_s += PAGES_S / 2 + 0.1
        return read(since)

    host.samples = slow
    fleet.round()
    assert len(asked) == 2
    fleet.round()
    assert (asked, fleet.reader.missed) == (sorted(set(asked)), 0)
    assert host.observer.read(asked[-1])[0]["behind"] == 0


def test_samples_that_were_cleared_on_purpose_are_not_missed():
    """A store that is told to sample otherwise drops what it had; what the ring had no room for still counts."""
    fleet = Fleet(hosts=1)
    fleet.round()
    fleet.play(conversations(300, hosts=1))
    observer = fleet.hosts[0].observer
    for version, rate in ((50, 0.5), (51, 1.0)):
        observer.adopt(Sampling(0, rate, (), version))
    fleet.told(conversations(200, hosts=1, seed=1))
    assert fleet.reader.missed == 0
    many = list(conversations(5000, hosts=1))
    observer.adopt(Sampling(0, 0.5, (), 60))
    observer.adopt(Sampling(0, 1.0, (), 61))
    fleet.told(many)
    assert fleet.reader.missed == sum(len(keys) for _, keys in many) - 32_768


def test_an_engines_name_may_hold_what_unicode_takes_for_the_end_of_a_line():
    """A store writes it as it is: its lines end with a line feed alone."""
    fleet, requests = begun(100)
    sound = fleet.hosts[1].samples
    fleet.hosts[1].samples = lambda since: sound(since).replace('"engine": "', '"engine": "\u2028\x85') + "\n"
    assert sum(fleet.counts(requests)) == 100


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"boot_id": "b"}'])
def test_nonsense_is_left_out_and_logged_once_until_it_makes_sense(text, caplog):
    """The others go on; of a store that is merely away nothing is said."""
    fleet, requests = begun(100)
    sound = fleet.hosts[1].samples
    fleet.hosts[1].samples = lambda _since: text
    assert fleet.counts(requests) == [sum(host == 0 for host, _ in requests)]
    fleet.round()
    (said,) = caplog.messages
    assert said.startswith("http://host-1/v1/samples answers what no store answers, sizes are weighed without it: ")
    fleet.hosts[1].samples = sound
    fleet.round()
    fleet.hosts[1].up = False
    fleet.round()
    assert len(caplog.messages) == 1
    fleet.hosts[1].up, fleet.hosts[1].samples = True, lambda _since: text
    fleet.round()
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *[("chain_len", value) for value in ("1e999", "1" + 30 * "0", "-1")],
        *[("pos", value) for value in ("1e999", "1" + 30 * "0", "-1")],
        *[("t", value) for value in ("1e999", "-1e30")],
        *[("requests", value) for value in ("1e999", "1" + 30 * "0", "-1", '"1"')],
        ("next", "1e999"),
        *[(where, "null") for where in ("next", "rate", "hot_version", "dropped", "behind", "time_s")],
        ("rate", 100_000 * "["),
    ],
)
def test_absurd_numbers_of_one_store_are_nonsense(where, value):
    """What no prompt has, and no database holds: that store is left out, the others have their prospect."""
    fleet, requests = begun(100)
    sound = fleet.hosts[1].samples
    fleet.hosts[1].samples = lambda since: re.sub(f'"{where}": [^,}}]*', f'"{where}": {value}', sound(since))
    assert fleet.counts(requests) == [sum(host == 0 for host, _ in requests)]


def test_a_store_need_not_tell_what_is_not_read():
    """Of a namespace's totals requests and chunks are enough: another version may count less beside them."""
    fleet, requests = Fleet(hosts=1), list(conversations(100, hosts=1))
    whole = fleet.hosts[0].samples

    def bare(since):
        head, *lines = whole(since).splitlines()
        told = json.loads(head)
        read = ("requests", "chunks", "hot_candidates")
        told["namespaces"] = {d: {name: one[name] for name in read} for d, one in told["namespaces"].items()}
        return "\n".join([json.dumps(told), *lines])

    fleet.hosts[0].samples = bare
    fleet.round()
    assert fleet.counts(requests) == [100]


def test_a_store_that_restarts_is_read_from_its_beginning():
    """Its numbers begin at 0 again; what came since the boot is all there."""
    fleet = Fleet(hosts=1)
    fleet.round()
    fleet.told(conversations(50, hosts=1))
    fleet.now_s += 1
    host, asked = fleet.hosts[0], []
    host.boot()
    read = host.samples
    host.samples = lambda since: asked.append(since) or read(since)
    fleet.round()  # the first answer of a boot: it is told how to sample
    assert asked[1:] == [0]
    assert fleet.counts(conversations(80, hosts=1)) == [80]
    assert fleet.reader.missed == 0


def test_a_store_at_the_address_of_another_is_counted_from_its_first_answer():
    """What it had was read at its former address: no prospect is of that again."""
    fleet, requests = begun(200)
    assert fleet.counts(requests) == [200]
    here, moved = fleet.hosts
    here.name, here.boot_id, here.observer, here.session = moved.name, moved.boot_id, moved.observer, moved.session
    fleet.hosts = [here]
    assert fleet.counts() == []
    assert fleet.counts(conversations(50, hosts=1)) == [50]


def test_a_namespace_that_a_store_forgot_and_serves_again_is_counted_anew():
    """Its totals begin at 0 again, though the store was not started anew."""
    fleet = Fleet(hosts=1)
    fleet.round()
    assert fleet.counts(conversations(80, hosts=1)) == [80]
    observer, session = fleet.hosts[0].observer, fleet.hosts[0].session
    observer.forget(session.digest)
    observer.attach(session)
    assert fleet.counts(conversations(50, hosts=1)) == [50]


def test_a_store_that_is_away_holds_nobody_up():
    """The others' requests count; its own are there when it is back."""
    fleet, requests = begun(200)
    fleet.play(requests)
    at_zero = sum(host == 0 for host, _ in requests)
    fleet.hosts[1].up = False
    assert fleet.counts() == [at_zero]
    fleet.hosts[1].up = True
    assert fleet.counts() == [200 - at_zero]


def test_nothing_is_told_before_costs_are_known():
    """Without what a prefill costs there is no prospect, although requests came."""
    fleet = Fleet()
    for host in fleet.hosts:
        host.prefill = None
    fleet.round()
    assert fleet.told(conversations(50)) == []
