"""Policy files: strict, placed errors, overrides in order, calendars, hot reload."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tiertune_agent.policy.document import (
    DEFAULT,
    advises,
    followed,
    frozen_by,
    load,
    mode_of,
    rates,
    rules_for,
    schema,
    settable,
)
from tiertune_agent.policy.lint import manages, without_effect
from tiertune_agent.records import Target
from tiertune_agent.tuners.admission import AdmissionSettings
from tiertune_agent.tuners.base import TunerSettings
from tiertune_agent.tuners.registry import Tuners
from tiertune_connector.documents import DocumentError

POLICIES = Path(__file__).parents[2] / "policies"
CONTRACT = """\
version: 1
mode: recommend                 # observe | recommend | auto; a tuner may say its own
objectives: {ttft_p99: 2s}      # may be left out
prices: {gpu_hour: 2.5, dram_gib_month: 3.0, disk_gib_month: 0.1, remote_gib_month: 4.0, network_gib: 0.0}
budgets: {dram: 256GiB, disk: 2TiB, remote: 512GiB}      # per fleet; any may be left out; or total: 1TiB
guard: {changes_per_hour: 4, min_requests: 500, soak: 10m, roll_back_if_worse_by: 0.02,
        freeze: [{days: [fri, sat], from: "18:00", to: "06:00", zone: UTC}], holdout: 0.0}
tuners:
  remote_fetch: {mode: auto, period: 30s, margin: 1.1, disable_after: 4, enable_after: 4, min_fetch_tokens: 0}
  tier_size:    {period: 5m, min: {dram: 4GiB}, max: {dram: 128GiB}, max_step: 0.5, min_gain: 0.03, hold_off: 15m}
  eviction:     {period: 30m, candidates: [lru, arc, s3fifo], min_gain: 0.03, hold_off: 6h}
  admission:    {period: 30m, hold_off: 6h}
remote: {manage: false}
overrides:                      # each entry whose match fits is laid over the above, in order
  - match: {model: "llama-*", store: "gpu-a*"}
    tuners: {tier_size: {max: {dram: 32GiB}}}
"""
LAID_OVER = "overrides:\n- match: {store: a}\n  tuners: {tier_size: {max: {dram: 1GiB}}}\n"
TWO = (
    "overrides:\n- match: {{store: '{}'}}\n  tuners: {{tier_size: {{min: {{dram: 2GiB}}}}}}\n"
    "- match: {{store: '{}'}}\n  tuners: {{tier_size: {{max: {{dram: 1GiB}}}}}}\n"
)
GIB = 1 << 30


@pytest.fixture
def policy_of(tmp_path):
    def parse(text):
        (tmp_path / "p.yaml").write_text(text)
        return load(tmp_path / "p.yaml").policy

    return parse


def problems(tmp_path, text):
    """What is said of a bad file, without the folder."""
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(DocumentError) as caught:
        load(tmp_path / "p.yaml")
    return [problem.replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def test_the_contracts_example_is_understood(policy_of):
    """Every key of the contract is read, in its unit."""
    policy = policy_of(CONTRACT)
    assert policy.objectives.ttft_p99 == 2.0
    assert policy.budgets.disk == 2 << 40
    assert policy.tuners.tier_size.max.dram == 128 * GIB
    assert policy.tuners.eviction.hold_off == 6 * 3600
    assert policy.guard.freeze[0].start.hour == 18


@pytest.mark.parametrize("name", ["default.yaml", "demo.yaml"])
def test_the_shipped_policies_are_sound(name):
    """What is shipped passes its own lint, without notes."""
    assert without_effect(load(POLICIES / name).policy) == []


def test_the_shipped_default_is_the_built_in_one_and_changes_nothing():
    """default.yaml spells out the built-in policy; under it, no tuner changes anything by itself."""
    policy = load(POLICIES / "default.yaml").policy
    assert policy == DEFAULT.policy
    for tuner in ("remote_fetch", "tier_size", "eviction", "gate_settings", "admission", "routing"):
        assert rules_for(policy, tuner, "dram", elsewhere={}).mode == "recommend"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "p.yaml:1:1: the file is empty"),
        ("version: 2\n", "p.yaml:1:10: version: Input should be 1"),
        ("mode: auto\n", "p.yaml:1:1: version: Field required"),
        ("version: 1\nmoed: auto\n", "p.yaml:2:1: moed: unknown key: did you mean mode?"),
        ("version: 1\nmode: on\n", "p.yaml:2:7: mode: Input should be 'observe', 'recommend' or 'auto'"),
        ("version: 1\nversion: 1\n", "p.yaml:2:1: version: the key stands here a second time"),
        (
            "version: 1\ntuners: {remote_fetch: {min_fetch_tokens: 10000000000}}\n",
            "p.yaml:2:43: tuners.remote_fetch.min_fetch_tokens: Input should be less than or equal to 2147483648",
        ),
        ("version: 1\nprices: {gpu_hour: .inf}\n", "p.yaml:2:20: prices.gpu_hour: Input should be a finite"),
        (
            "version: 1\nprices: {gpu_hour: 1e300}\n",
            "p.yaml:2:20: prices.gpu_hour: Input should be less than or equal to",
        ),
        (
            "version: 1\nprices: {gpu_hour: 1e-300}\n",
            "p.yaml:2:20: prices.gpu_hour: Input should be 0, or at least 1e-09",
        ),
        (
            "version: 1\ntuners: {eviction: {period: 0s}}\n",
            "p.yaml:2:29: tuners.eviction.period: Input should be greater",
        ),
        ("version: 1\nguard: {soak: 10x}\n", "p.yaml:2:15: guard.soak: '10x' is not understood"),
        (
            "version: 1\nguard:\n  freeze:\n  - {from: 18:00, to: '06:00'}\n",
            "p.yaml:4:12: guard.freeze.0.from: write a time",
        ),
        (
            "version: 1\nguard: {freeze: [{from: '18:00', to: '06:00+02:00'}]}\n",
            "p.yaml:2:38: guard.freeze.0.to: write a time",
        ),
        (
            "version: 1\nguard: {freeze: [{from: '18:00', to: '06:00', zone: Mars/Base}]}\n",
            "p.yaml:2:53: guard.freeze.0.zone: no time zone is called 'Mars/Base'",
        ),
        (
            "version: 1\ntuners:\n  tier_size: {min: {dram: 4GiB}, max: {dram: 1GiB}}\n",
            "p.yaml:3:14: tuners.tier_size: dram: min 4.0 GiB is above max 1.0 GiB",
        ),
        (
            "version: 1\nbudgets: {dram: 1GiB, total: 2GiB}\n",
            "p.yaml:2:10: budgets: give either total or budgets by tier",
        ),
        (
            "version: 1\ntuners:\n  eviction: {candidates: [lru, fifo]}\n",
            "p.yaml:3:32: tuners.eviction.candidates.1: Input",
        ),
        ("version: 1\noverrides:\n- tuners: {}\n", "p.yaml:3:3: overrides.0.match: Field required"),
        (
            "version: 1\noverrides:\n- match: {sotre: a}\n",
            "p.yaml:3:11: overrides.0.match.sotre: unknown key: did you mean store?",
        ),
        (
            "version: 1\ntuners: {tier_size: {min: {dram: 4GiB}}}\n" + LAID_OVER,
            "p.yaml:4:1: overrides: entry 0, laid over the rest: tuners.tier_size: ",
        ),
        (
            "version: 1\n" + TWO.format("h*", "*a"),
            "p.yaml:3:1: overrides: entry 0 and entry 1, laid over the rest: tuners.tier_size: dram: min 2.0 GiB",
        ),
        ("version: 1\n  mode: auto\n", "p.yaml:2:7: not YAML: mapping values are not allowed"),
        ("- 1\n", "p.yaml:1:1: Input should be keys with values"),
    ],
)
def test_a_bad_file_is_told_with_its_place(tmp_path, text, said):
    """Every kind of mistake is named with file, line, column and field."""
    assert [p for p in problems(tmp_path, text) if p.startswith(said)]


@pytest.mark.parametrize("stores", [("a", "b"), ("a", "a?"), ("gpu-a*", "gpu-b*"), ("*-a", "*-b"), ("a*", "ba")])
def test_overrides_that_no_target_fits_both_may_contradict(policy_of, stores):
    """Of different stores one may have a least size above the other's most."""
    assert policy_of("version: 1\n" + TWO.format(*stores)).for_target(Target(stores[0], "dram"))


def test_all_problems_are_told_at_once(tmp_path):
    """One run of the lint tells everything that is wrong."""
    text = "version: 1\nmode: no\nguard: {holdout: 2, typo: 1}\n"
    assert len(problems(tmp_path, text)) == 3


def test_a_missing_file_is_a_problem_with_its_path(tmp_path):
    """A path that cannot be read is told as such."""
    with pytest.raises(DocumentError, match=r"p\.yaml: cannot be read: No such file"):
        load(tmp_path / "p.yaml")


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


def test_the_calendar_counts_in_its_own_zone(policy_of):
    """Hours are those of the zone that the file names."""
    policy = policy_of('version: 1\nguard: {freeze: [{from: "09:00", to: "10:00", zone: Asia/Tokyo}]}\n')
    assert frozen_by(policy, datetime(2025, 3, 7, 0, 30, tzinfo=UTC)).endswith("Fri 10:00 JST")
    assert not frozen_by(policy, datetime(2025, 3, 7, 9, 30, tzinfo=UTC))


@given(minutes=st.integers(0, 7 * 24 * 60))
def test_equal_hours_freeze_the_whole_day(minutes):
    """From and to at the same hour is a day and night, so every day together never end."""
    policy = DEFAULT.policy.model_validate(
        {"version": 1, "guard": {"freeze": [{"from": "06:00", "to": "06:00"}]}}, strict=False
    )
    assert frozen_by(policy, datetime(2025, 3, 3, tzinfo=UTC) + timedelta(minutes=minutes))


def test_a_reload_takes_a_good_edit_and_refuses_a_bad_one(tmp_path):
    """A bad edit keeps the last good policy in force and says why; mended, it is taken."""
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nmode: observe\n")
    file = followed(path)
    path.write_text("version: 1\nmode: auto\n")
    assert (file.look().policy.mode, file.problem) == ("auto", "")
    path.write_text("version: 1\nmode: aotu\n")
    assert file.look().policy.mode == "auto"
    assert ":2:7: mode: Input should be" in file.problem
    path.unlink()
    assert file.look().policy.mode == "auto"
    assert "cannot be read" in file.problem
    path.symlink_to(os.devnull)
    assert file.look().policy.mode == "auto"
    assert "cannot be read: it is no regular file" in file.problem
    path.unlink()
    path.write_text("version: 1\nmode: recommend\n")
    assert (file.look().policy.mode, file.problem) == ("recommend", "")


def test_without_a_file_the_built_in_policy_holds():
    """No policy file: the default, which only recommends."""
    file = followed(None)
    assert file.look().policy.mode == "recommend"
    assert file.content.digest == DEFAULT.digest


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
    boundless = without_effect(policy_of("version: 1\nremote: {manage: true}\n"))
    assert [note.split(":")[0] for note in boundless] == ["remote.manage"]
    of_a_store = "overrides: [{match: {store: a}, remote: {manage: true}}]\n"
    notes = without_effect(policy_of(f"version: 1\n{of_a_store}"))
    assert [note.split(":")[0] for note in notes] == ["overrides.0.remote.manage"]


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


def test_more_windows_than_are_read_are_told(policy_of):
    """A row of more than 240 windows is never seen: what waits for one never comes."""
    fetch = "tuners: {{remote_fetch: {{disable_after: {}, enable_after: {}}}}}"
    assert without_effect(policy_of(f"version: 1\n{fetch.format(240, 240)}\n")) == []
    of_a_store = f"overrides: [{{match: {{store: a}}, {fetch.format(2, 241)}}}]"
    notes = without_effect(policy_of(f"version: 1\n{fetch.format(241, 4)}\n{of_a_store}\n"))
    assert [note.split(", ")[0] for note in notes] == [
        "tuners.remote_fetch.disable_after: fetching is never switched off",
        "overrides.0.tuners.remote_fetch.enable_after: fetching is never switched on again",
    ]


def test_a_tuner_that_only_recommends_says_so_on_auto(policy_of):
    """Mode auto of advice, which nothing can apply, is told; not its hold-off, for which what was rejected waits."""
    notes = without_effect(policy_of("version: 1\nmode: auto\ntuners: {advice: {mode: auto, hold_off: 1h}}\n"))
    assert [note.split(":")[0] for note in notes] == ["tuners.advice.mode"]


def test_prices_become_rates(policy_of):
    """A month has 730 hours."""
    made = rates(policy_of(CONTRACT).prices)
    assert made.gib_hour["dram"] == pytest.approx(3.0 / 730)
    assert made.gpu_hour == 2.5


def test_the_shipped_schema_is_up_to_date():
    """policies/schema.json is what the code says (tiertune policy schema --out policies/schema.json)."""
    assert (POLICIES / "schema.json").read_text() == schema()


@pytest.mark.parametrize(
    "wrong",
    [
        "moed: auto",
        "guard: {min_requests: yes}",
        "guard: {min_requests: '5'}",
        "remote: {manage: 'yes'}",
        "mode: [auto]",
    ],
)
def test_the_schema_takes_what_the_loader_takes(policy_of, wrong):
    """Editors accept the contract's example; they and the loader refuse an unknown key and a value of another type."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(json.loads(schema()))
    assert list(validator.iter_errors(yaml.safe_load(CONTRACT))) == []
    assert list(validator.iter_errors({"version": 1, **yaml.safe_load(wrong)}))
    with pytest.raises(DocumentError):
        policy_of(f"version: 1\n{wrong}\n")
