"""What a policy says to whom and when: overrides, modes, budgets, calendars, and what of it has no effect."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.policies import CONTRACT, GIB
from tiertune_agent.policy import present
from tiertune_agent.policy.document import (
    DEFAULT,
    advises,
    frozen_by,
    load,
    mode_of,
    rates,
    rules_for,
    settable,
)
from tiertune_agent.policy.lint import ENDLESS, manages, without_effect
from tiertune_agent.records import Target
from tiertune_agent.tuners.admission import AdmissionSettings
from tiertune_agent.tuners.base import TunerSettings
from tiertune_agent.tuners.registry import Tuners

OVERRIDES = """
version: 1
mode: observe
tuners: {tier_size: {max: {dram: 100GiB, disk: 1TiB}}}
overrides:
- match: {store: "gpu-*"}
  mode: recommend
  tuners: {tier_size: {max: {dram: 50GiB}}}
- match: {store: "gpu-a*", model: "llama-*"}
  mode: auto
  tuners: {tier_size: {max: {dram: 25GiB}}, remote_fetch: {disable_after: 9}}
"""


@pytest.mark.parametrize(
    ("store", "models", "laid"),
    [
        ("cpu-1", ("llama-8b",), ("observe", 100, 4)),
        ("gpu-b", ("llama-8b",), ("recommend", 50, 4)),
        ("gpu-a1", ("llama-8b", "llama-70b"), ("auto", 25, 9)),
        ("gpu-a1", ("llama-8b", "qwen-32b"), ("recommend", 50, 4)),
        ("gpu-a1", (), ("recommend", 50, 4)),
    ],
)
def test_overrides_are_laid_over_in_order_field_by_field(policy_of, store, models, laid):
    """Later entries win, only where they fit every model of the target, and only in the fields that they name."""
    rule = policy_of(OVERRIDES).for_target(Target(store, "dram", models=models))
    sizes = rule.tuners.tier_size.max
    assert (rule.mode, sizes.dram / GIB, rule.tuners.remote_fetch.disable_after) == laid
    assert rule.tuners.tier_size.max.disk == 1 << 40


def test_a_copy_of_a_policy_lays_its_own_rules_over(policy_of):
    """What was laid over before it was copied is the other's."""
    policy, target = policy_of(OVERRIDES), Target("cpu-1", "dram")
    laid = policy.for_target(target)
    assert policy.model_copy(update={"mode": "auto"}).for_target(target).mode == "auto"
    assert policy.for_target(target) is laid
    assert (laid.mode, policy) == ("observe", policy_of(OVERRIDES))


def test_rules_come_from_the_tuner_and_then_from_the_policy(policy_of):
    """A tuner's own mode wins; bounds are those of its tier."""
    policy = policy_of(CONTRACT)
    assert rules_for(policy, "remote_fetch", "remote", elsewhere={}).mode == "auto"
    assert rules_for(policy, "gate_settings", "remote", elsewhere={}).mode == "auto"
    rules = rules_for(policy, "tier_size", "dram", elsewhere={})
    assert (rules.mode, rules.least, rules.most, rules.hold_off) == ("recommend", 4 * GIB, 128 * GIB, 900.0)


@pytest.mark.parametrize("mode", ["observe", "recommend", "auto"])
def test_what_only_advises_never_runs_on_auto(policy_of, monkeypatch, mode):
    """Its settings say so, under whatever key: policy and guard say recommend where auto is written, and a note why."""
    monkeypatch.setattr(AdmissionSettings, "advisory", True)
    policy = policy_of(f"version: 1\ntuners: {{admission: {{mode: {mode}}}, advice: {{mode: {mode}}}}}\n")
    most = "recommend" if mode == "auto" else mode
    for tuner in ("admission", "routing", "sharing", "balance", "loading"):
        assert advises(tuner)
        assert mode_of(policy, tuner) == rules_for(policy, tuner, "disk", elsewhere={}).mode == most
    noted = ["tuners.admission.mode", "tuners.advice.mode"] if mode == "auto" else []
    assert [note.split(":")[0] for note in without_effect(policy)] == noted


def test_what_may_change_something_is_told(monkeypatch):
    """All tuners but those that only advise; an operator's own as well."""

    class Own(Tuners):
        least_used: TunerSettings = TunerSettings(period=60.0)

    ours = ["remote_fetch", "tier_size", "eviction", "admission"]
    assert settable() == ours
    monkeypatch.setattr(AdmissionSettings, "advisory", True)
    own = DEFAULT.policy.model_copy(update={"tuners": Own()})
    monkeypatch.setattr("tiertune_agent.policy.document.DEFAULT", replace(DEFAULT, policy=own))
    ours.remove("admission")
    assert settable() == [*ours, "least_used"]


def test_what_is_no_tuner_any_more_has_the_policys_mode(policy_of):
    """A change may still soak when the tuner that wished it is taken out: it is judged like the others."""
    assert mode_of(policy_of("version: 1\nmode: auto\n"), "gone") == "auto"
    assert not advises("gone")


@pytest.mark.parametrize(
    ("budgets", "elsewhere", "most"),
    [
        ("dram: 64GiB", {}, 64),
        ("dram: 64GiB", {"dram": 40 * GIB, "disk": 999 * GIB}, 24),
        ("dram: 64GiB", {"dram": 90 * GIB}, 0),
        ("total: 200GiB", {"dram": 40 * GIB, "disk": 60 * GIB}, 100),
        ("total: 2TiB", {}, 128),
    ],
)
def test_budgets_are_the_fleets(policy_of, budgets, elsewhere, most):
    """What other stores and tiers hold already is no longer there to give."""
    policy = policy_of(f"version: 1\nbudgets: {{{budgets}}}\ntuners: {{tier_size: {{max: {{dram: 128GiB}}}}}}\n")
    assert rules_for(policy, "tier_size", "dram", elsewhere=elsewhere).most == most * GIB


@pytest.mark.parametrize(
    ("at", "frozen"),
    [
        ("2025-03-07T17:59", False),  # a Friday
        ("2025-03-07T18:00", True),
        ("2025-03-08T05:59", True),
        ("2025-03-08T06:00", False),
        ("2025-03-09T05:59", True),  # began on Saturday
        ("2025-03-09T18:30", False),
        ("2025-03-06T20:00", False),
    ],
)
def test_the_calendar_freezes_over_midnight(policy_of, at, frozen):
    """A freeze belongs to the day on which it begins."""
    now = datetime.fromisoformat(at).replace(tzinfo=UTC)
    assert bool(frozen_by(policy_of(CONTRACT), now)) is frozen


@pytest.mark.parametrize(
    ("day", "begins", "ends", "frozen"),
    [
        ("sat", "22:00", "02:30", (-240, 90)),
        ("sun", "02:30", "04:00", (30, 180)),
        ("sat", "02:30", "02:30", (-1410, 90)),
        ("sun", "03:30", "04:00", (150, 180)),
    ],
)
def test_a_freeze_has_no_gap_where_clocks_are_set_back(policy_of, day, begins, ends, frozen):
    """That night has 02:00 to 03:00 twice: what begins or ends then lasts from the first to the second time.

    ``frozen``: minutes since it is 02:00 for the first time.
    """
    guard = f'{{freeze: [{{days: [{day}], from: "{begins}", to: "{ends}", zone: Europe/Zurich}}]}}'
    policy, first = policy_of(f"version: 1\nguard: {guard}\n"), datetime(2025, 10, 26, tzinfo=UTC)
    start, end = frozen
    for minutes in (start, 0, 29, 30, 59, 60, 89, 90, end - 1):
        if start <= minutes < end:
            told = frozen_by(policy, first + timedelta(minutes=minutes))
            assert told == f"by the policy's calendar until Sun {ends} CET", minutes
    for minutes in (start - 1, end):
        assert not frozen_by(policy, first + timedelta(minutes=minutes)), minutes


def test_what_follows_at_once_is_one_freeze(policy_of):
    """A weekend is written as several: who asks on Friday evening is told of Monday, not of midnight."""
    friday = '{days: [fri], from: "18:00", to: "00:00", zone: Europe/Zurich}'
    weekend = '{days: [sat, sun], from: "00:00", to: "00:00", zone: Europe/Zurich}'
    monday = '{days: [mon], from: "00:00", to: "08:00", zone: Europe/Zurich}'
    policy = policy_of(f"version: 1\nguard: {{freeze: [{friday}, {weekend}, {monday}]}}\n")
    for day, hour, told in ((24, 20, "Mon 08:00 CET"), (26, 1, "Mon 08:00 CET"), (27, 6, "Mon 08:00 CET")):
        at = datetime(2025, 10, day, hour, tzinfo=UTC)  # clocks are set back on the 26th
        assert frozen_by(policy, at) == f"by the policy's calendar until {told}"
    assert not frozen_by(policy, datetime(2025, 10, 27, 7, tzinfo=UTC))


def test_a_freeze_without_end_is_told_all_the_same(policy_of):
    policy = policy_of('version: 1\nguard: {freeze: [{from: "00:00", to: "00:00"}]}\n')
    assert frozen_by(policy, datetime(2025, 10, 24, 20, tzinfo=UTC))


def test_a_freeze_ends_where_clocks_leave_out_its_end(policy_of):
    """That night has no time from 02:00 to 03:00."""
    policy = policy_of('version: 1\nguard: {freeze: [{from: "22:00", to: "02:30", zone: Europe/Zurich}]}\n')
    last = datetime(2025, 3, 30, 0, 59, tzinfo=UTC)
    assert frozen_by(policy, last)
    assert not frozen_by(policy, last + timedelta(minutes=1))


def test_the_calendar_counts_in_its_own_zone(policy_of):
    """Hours are those of the zone that the file names."""
    policy = policy_of('version: 1\nguard: {freeze: [{from: "09:00", to: "10:00", zone: Asia/Tokyo}]}\n')
    assert frozen_by(policy, datetime(2025, 3, 7, 0, 30, tzinfo=UTC)).endswith("Fri 10:00 JST")
    assert not frozen_by(policy, datetime(2025, 3, 7, 9, 30, tzinfo=UTC))


def test_an_override_may_freeze_alone(policy_of):
    """The hours of an override hold for what it fits, and for nobody else."""
    policy = policy_of(
        'version: 1\noverrides: [{match: {store: a}, guard: {freeze: [{from: "09:00", to: "10:00"}]}}]\n'
    )
    held = [
        frozen_by(policy.for_target(Target(store, "dram")), datetime(2025, 3, 7, 9, 30, tzinfo=UTC)) for store in "ab"
    ]
    assert held == ["by the policy's calendar until Fri 10:00 UTC", ""]


PRESENT = """
version: 1
mode: observe
tuners: {admission: {mode: recommend}}
overrides:
- match: {store: host-a, model: "llama-*"}
  mode: auto
- match: {store: host-a}
  guard: {freeze: [{from: "09:00", to: "12:00"}]}
- match: {store: fleet}
  mode: recommend
  guard: {freeze: [{from: "09:00", to: "10:00"}]}
"""


def test_what_tuners_may_do_at_a_store_is_that_of_its_targets(policy_of):
    """The strongest mode of any; of tiers that it has not, and of tuners that only advise, nothing is told."""
    policy, now = policy_of(PRESENT), datetime(2025, 3, 7, 9, 30, tzinfo=UTC)
    tiers = {"dram": {"health": "ok"}, "remote": {"health": "ok"}}
    both = {"tiers": tiers, "pools": {"a": {"model": "llama-8b", "dram": {}}, "b": {"model": "qwen-32b", "dram": {}}}}
    found = present.of_store(policy, "host-a", both, now)
    ours = {"remote_fetch": "observe", "tier_size": "observe", "eviction": "auto", "admission": "recommend"}
    assert (found.modes, found.document()["frozen"]) == (ours, "by the policy's calendar until Fri 12:00 UTC")
    other = present.of_store(policy, "host-b", {"tiers": {"dram": {"health": "ok"}}}, now)
    assert (other.modes, other.document()["frozen"]) == ({"tier_size": "observe"}, None)
    remote = present.of_remote(policy, now)
    assert remote.modes == {"tier_size": "recommend", "eviction": "recommend"}
    assert present.frozen_all(policy, (found, remote), now).hour == 10
    assert present.frozen_all(policy, (found, remote, other), now) is None
    assert present.frozen_all(policy, (), now) is None


@given(minutes=st.integers(0, 7 * 24 * 60))
def test_equal_hours_freeze_the_whole_day(minutes):
    """From and to at the same hour is a day and night, so every day together never end."""
    policy = DEFAULT.policy.model_validate(
        {"version": 1, "guard": {"freeze": [{"from": "06:00", "to": "06:00"}]}}, strict=False
    )
    assert frozen_by(policy, datetime(2025, 3, 3, tzinfo=UTC) + timedelta(minutes=minutes))


def test_a_freeze_that_never_ends_is_told(policy_of):
    """Also in an override; whole days are frozen so on purpose, and hours that differ end."""
    hours = '{days: %s, from: "06:00", to: "%s"}'
    every, some = "[mon, tue, wed, thu, fri, sat, sun]", "[sat, sun]"
    each = [hours % (every, "05:59"), hours % (some, "06:00"), hours % (every, "06:00"), '{from: "00:00", to: "00:00"}']
    guard = f"guard: {{freeze: [{', '.join(each)}]}}"
    told = without_effect(policy_of(f"version: 1\n{guard}\noverrides: [{{match: {{store: a}}, {guard}}}]\n"))
    of_all = [f"guard.freeze.{index}.to: {ENDLESS}" for index in (2, 3)]
    assert told == [*of_all, *(f"overrides.0.{note}" for note in of_all)]


def test_keys_without_effect_are_told(policy_of):
    """What the file sets and this version does not act on is said, also within overrides."""
    notes = without_effect(policy_of(CONTRACT + "    objectives: {ttft_p99: 1s}\n"))
    assert [note.split(":")[0] for note in notes] == [
        "objectives",
        "budgets.remote",
        "overrides.0.objectives",
    ]


def test_sizes_of_the_remote_have_an_effect_only_where_it_is_managed(policy_of):
    """Managed: nothing to tell but a missing bound, or an override that cannot fit the fleet's remote."""
    managed = CONTRACT.replace("manage: false", "manage: true")
    assert [note.split(":")[0] for note in without_effect(policy_of(managed))] == ["objectives"]
    boundless, of_a_store = "remote: {manage: true}", "overrides: [{match: {store: a}, remote: {manage: true}}]"
    for text, place in (
        (boundless, "remote.manage"),
        (of_a_store.replace("store: a", "store: fleet"), "overrides.0.remote.manage"),
        (of_a_store, "overrides.0.remote.manage"),
    ):
        (note,) = without_effect(policy_of(f"version: 1\n{text}\n"))
        assert note.split(":")[0] == place


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("remote: {manage: true}\n", ":2:10"),
        ("overrides:\n- match: {store: fleet}\n  remote: {manage: true}\n- match: {store: fleet}\n", ":4:12"),
        ("remote: {manage: true}\noverrides: [{match: {store: fleet}, remote: {manage: false}}]\n", ""),
        ("overrides: [{match: {store: a}, remote: {manage: true}}]\n", ""),
    ],
)
def test_what_makes_the_remote_managed_has_a_place(tmp_path, text, place):
    """The key that holds for it, be it of an override; none where it is not managed."""
    path = tmp_path / "policy.yaml"
    path.write_text(f"version: 1\n{text}")
    assert manages(load(path)) == (f"{path}{place}" if place else "")


def test_a_tuner_that_only_recommends_says_so_on_auto(policy_of):
    """Mode auto of advice, which nothing can apply, is told; not its hold-off, for which what was rejected waits."""
    notes = without_effect(policy_of("version: 1\nmode: auto\ntuners: {advice: {mode: auto, hold_off: 1h}}\n"))
    assert [note.split(":")[0] for note in notes] == ["tuners.advice.mode"]


@pytest.mark.parametrize(
    ("own", "override", "outranked"),
    [
        ("remote_fetch: {mode: auto}", "mode: observe", "tuners.remote_fetch.mode (auto)"),
        ("remote_fetch: {mode: auto}", "mode: recommend", "tuners.remote_fetch.mode (auto)"),
        ("remote_fetch: {mode: auto}", "mode: auto", ""),
        ("remote_fetch: {mode: observe}", "mode: auto", ""),
        ("remote_fetch: {mode: auto}", "guard: {soak: 5m}", ""),
        ("remote_fetch: {mode: auto}", "mode: observe, tuners: {remote_fetch: {mode: auto}}", ""),
        ("remote_fetch: {mode: auto}", "mode: observe, tuners: {remote_fetch: {mode: null}}", ""),
        (
            "remote_fetch: {mode: auto}, eviction: {mode: recommend}",
            "mode: observe, tuners: {remote_fetch: {period: 1m}}",
            "tuners.remote_fetch.mode (auto), tuners.eviction.mode (recommend)",
        ),
    ],
)
def test_an_override_that_calms_not_all_tuners_is_told(policy_of, own, override, outranked):
    """Hands off these hosts is not off what has a stronger mode of its own, unless the override names that as well."""
    text = f"version: 1\ntuners: {{{own}}}\noverrides: [{{match: {{store: b}}, {override}}}]\n"
    note = f"overrides.0.mode: a tuner's own mode outranks it: {outranked}; set that here, too"
    assert without_effect(policy_of(text)) == ([note] if outranked else [])


def test_another_entry_for_the_same_stores_may_calm_the_rest(policy_of):
    """Nothing to tell then."""
    calm = "{match: {store: b}, mode: observe}, {match: {store: b}, tuners: {remote_fetch: {mode: observe}}}"
    text = f"version: 1\ntuners: {{remote_fetch: {{mode: auto}}}}\noverrides: [{calm}]\n"
    assert without_effect(policy_of(text)) == []


def test_prices_become_rates(policy_of):
    """A month has 730 hours."""
    made = rates(policy_of(CONTRACT).prices)
    assert made.gib_hour == pytest.approx({"dram": 3.0 / 730, "disk": 0.1 / 730, "remote": 4.0 / 730})
    assert made.gpu_hour == 2.5
