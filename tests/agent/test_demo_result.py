"""The demo alone: what its result counts and says is missing, and what its screen shows."""

from datetime import UTC, datetime, timedelta
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from tiertune_agent.collector.adapters.exposition import Exposition
from tiertune_agent.demo import result, screen
from tiertune_agent.demo.result import OF_TIER, TIERS, Figures
from tiertune_agent.demo.run import Run
from tiertune_agent.replay.traces import builtin_trace
from tiertune_connector.ending import Ending


def decision(number, after, at_s, *, state="applied", tuner="remote_fetch"):
    told = {"id": number, "tuner": tuner, "store": "host-a", "pool": "", "reason": "because", "at_s": at_s}
    return told | {"field": "tiers.remote.fetch", "from": "off" if after == "on" else "on", "to": after, "state": state}


def tiers_of(**parts):
    return {tier: dict.fromkeys(OF_TIER, 0.0) | parts for tier in TIERS}


def figures(*decisions, hits=1.0, **counted):
    return Figures(90.0, tiers_of(hit_tokens=hits, saved_s=1.0), list(decisions), 45, counted)


@pytest.mark.parametrize(
    ("decisions", "missing"),
    [
        ([decision(1, "off", 35), decision(2, "on", 65)], []),
        ([decision(1, "off", 35)], ["fetch again"]),
        ([decision(1, "off", 20), decision(2, "on", 25)], ["stop fetching"]),
        ([decision(1, "on", 31), decision(2, "off", 35)], ["fetch again"]),
        ([decision(1, "off", 35, state="proposed"), decision(2, "on", 65)], ["stop fetching"]),
        ([decision(1, "off", 35, tuner="another"), decision(2, "on", 65)], ["stop fetching"]),
    ],
)
def test_only_off_while_slow_and_on_after_it_proves_the_point(decisions, missing):
    """Applied decisions of remote_fetch, in this order, off within the slow third."""
    told = result.shortfall(figures(*decisions), (30.0, 60.0))
    assert len(told) == len(missing)
    assert all(words in line for words, line in zip(missing, told, strict=True))


def test_tiers_without_hits_and_wrong_bytes_are_told():
    """Neither a tier that served nothing nor a foreign chunk passes for a success."""
    good = [decision(1, "off", 35), decision(2, "on", 65)]
    assert result.shortfall(figures(*good, hits=0.0), (30.0, 60.0)) == ["no hit in dram", "no hit in remote"]
    assert result.damage(figures(*good)) == []
    assert "in 1 chunk" in result.damage(figures(*good, wrong=1))[0]


def test_figures_are_sums_over_stores_and_the_agent():
    """Counters of two stores add up; what a Redis holds and evicted is the agent's alone, whatever its policy was."""

    def store(hit):
        return Exposition(
            f'tiertune_tier_lookup_tokens_total{{tier="dram",result="hit",origin="self"}} {hit}\n'
            'tiertune_tier_lookup_tokens_total{tier="dram",result="miss",origin=""} 99.0\n'
            'tiertune_tier_resident_bytes{tier="dram",namespace="n"} 5\n'
            'tiertune_tier_capacity_bytes{tier="dram",state="desired",namespace="n"} 9\n'
            'tiertune_tier_capacity_bytes{tier="dram",state="effective",namespace="n"} 7\n'
        )

    agent = Exposition(
        'tiertune_tier_resident_bytes{tier="remote"} 6\n'
        'tiertune_tier_evictions_total{tier="remote",algorithm="allkeys-lru",reason="room"} 3.0\n'
        'tiertune_tier_evictions_total{tier="remote",algorithm="allkeys-lfu",reason="room"} 4.0\n'
        "tiertune_agent_loop_seconds_count 45.0\n"
    )
    told = [agent, store(1.0), store(2.0)]
    none = dict.fromkeys(OF_TIER, 0.0)
    assert result.tiers(told) == {
        "dram": none | {"hit_tokens": 3.0, "resident_bytes": 10, "capacity_bytes": 14},
        "remote": none | {"evictions": 7, "resident_bytes": 6},
    }
    assert result.total(told, "agent_loop_seconds_count") == 45
    assert result.tiers([Exposition("")])["dram"] == none


def test_while_nobody_answers_both_tiers_are_told_without_a_hit():
    """An early end, before the first answers, gives a result of the same form; a whole run like that shows nothing."""
    silent = Figures(90.0)
    nothing = dict.fromkeys(("hit_tokens", "evictions", "resident_bytes", "capacity_bytes"), 0)
    assert silent.document()["tiers"] == {"dram": nothing, "remote": nothing}
    assert result.shortfall(silent, (30.0, 60.0))[:2] == ["no hit in dram", "no hit in remote"]


def test_decisions_are_told_in_order_with_seconds_since_the_start():
    """``at_s`` counts from the start of the run to when the change was applied, else proposed."""
    start = datetime(2025, 1, 1, tzinfo=UTC)
    names = {
        "tuner": "remote_fetch",
        "store": "a",
        "pool": "",
        "field": "tiers.remote.fetch",
        "from": "on",
        "to": "off",
        "state": "kept",
        "reason": "r",
    }
    later = names | {"id": 2, "created_at": "x", "applied_at": (start + timedelta(seconds=8)).isoformat()}
    early = names | {"id": 1, "created_at": (start + timedelta(seconds=5)).isoformat(), "applied_at": None}
    assert [(d["id"], d["at_s"]) for d in result.decisions([later, early], start)] == [(1, 5.0), (2, 8.0)]


def test_a_decision_on_a_size_is_told_in_bytes_and_shown_in_units():
    """The JSON keeps numbers; people read 10.0 MiB, and whether it was applied. Tokens are no bytes."""
    size = decision(3, 15 << 20, 20.0, state="proposed", tuner="tier_size") | {"from": 10 << 20}
    size |= {"field": "tiers.dram.capacity_bytes"}
    floor = decision(4, 1024, 21.0, tuner="gate_settings") | {"field": "tiers.remote.min_fetch_tokens", "from": 0}
    assert screen.decided(floor) == "host-a: gate_settings 0 → 1024"
    assert figures(size).document()["decisions"][0]["from"] == 10 << 20
    assert screen.decided(size) == "host-a: tier_size 10.0 MiB → 15.0 MiB (proposed)"


def scene():
    return screen.Scene("a trace", "http://127.0.0.1:7420/", 90, (30.0, 60.0), 3 << 20)


def told(*, terminal):
    """All that is printed in a demo of 90 seconds with one decision."""
    console = Console(width=300, record=True, force_terminal=terminal, file=StringIO())
    with screen.teller(console, scene()) as tell:
        for at_s in np.arange(0.0, 90.0, 0.5):
            done = [decision(1, "off", 35)] if at_s >= 35 else []
            tell(Figures(float(at_s), tiers_of(), done, counted={"requests": 7}))
    return console.export_text()


@pytest.mark.parametrize("terminal", [True, False])
def test_each_decision_and_each_change_of_the_remote_is_one_line(terminal):
    """Told once each, with its reason, however often the demo looks."""
    text = told(terminal=terminal)
    assert text.count("0:30  THE REMOTE IS SLOWED to 3.0 MiB/s per host, from 0:30 to 1:00\n") == 1
    assert text.count("0:35  host-a: remote_fetch on → off: because\n") == 1
    assert terminal or len(text.splitlines()) == 5


def test_a_terminal_shows_what_was_done_so_far():
    """The clock goes on below the lines; elsewhere it is not printed."""
    now = "1:29 of 1:30  7 requests · saved 0.0 s"
    assert now in told(terminal=True)
    assert now not in told(terminal=False)


def test_what_a_child_said_last_is_told_as_it_stands(capsys):
    """Its log has lines such as ``host.py:100:``, which is no emoji."""
    assert Run(builtin_trace("lmcache_agents"), 90, Ending())._conclude(["host-a ended: host.py:100: why"], None) == 1
    assert "NOT SHOWN: host-a ended: host.py:100: why" in capsys.readouterr().out
