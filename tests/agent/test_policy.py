"""Policy files: strict, placed errors, shipped ones, hot reload, schema."""

import json
import os
from pathlib import Path

import pytest
import yaml

from agent.policies import CONTRACT, GIB
from reference.build import schema
from tiertune_agent.policy.document import (
    DEFAULT,
    followed,
    load,
    rules_for,
)
from tiertune_agent.policy.lint import without_effect
from tiertune_agent.records import Target
from tiertune_connector.documents import DocumentError

POLICIES = Path(__file__).parents[2] / "policies"

LAID_OVER = "overrides:\n- match: {store: a}\n  tuners: {tier_size: {max: {dram: 1GiB}}}\n"

TWO = (
    "overrides:\n- match: {{store: '{}'}}\n  tuners: {{tier_size: {{min: {{dram: 2GiB}}}}}}\n"
    "- match: {{store: '{}'}}\n  tuners: {{tier_size: {{max: {{dram: 1GiB}}}}}}\n"
)


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


MISTAKES = {
    "": "p.yaml:1:1: the file is empty",
    "version: 2\n": "p.yaml:1:10: version: Input should be 1",
    "mode: auto\n": "p.yaml:1:1: version: Field required",
    "version: 1\nmoed: auto\n": "p.yaml:2:1: moed: unknown key: did you mean mode?",
    "version: 1\nmode: on\n": "p.yaml:2:7: mode: Input should be 'observe', 'recommend' or 'auto'",
    "version: 1\nversion: 1\n": "p.yaml:2:1: version: the key stands here a second time",
    "version: 1\ntuners: {remote_fetch: {min_fetch_tokens: 10000000000}}\n": (
        "p.yaml:2:43: tuners.remote_fetch.min_fetch_tokens: Input should be less than or equal to 2147483648"
    ),
    "version: 1\nprices: {gpu_hour: .inf}\n": "p.yaml:2:20: prices.gpu_hour: Input should be a finite",
    "version: 1\nprices: {gpu_hour: 1e300}\n": "p.yaml:2:20: prices.gpu_hour: Input should be less than or equal to",
    "version: 1\nprices: {gpu_hour: 1e-300}\n": "p.yaml:2:20: prices.gpu_hour: Input should be 0, or at least 1e-09",
    "version: 1\ntuners: {eviction: {period: 0s}}\n": "p.yaml:2:29: tuners.eviction.period: Input should be greater",
    "version: 1\nguard: {soak: 10x}\n": "p.yaml:2:15: guard.soak: '10x' is not understood",
    "version: 1\nguard:\n  freeze:\n  - {from: 18:00, to: '06:00'}\n": "p.yaml:4:12: guard.freeze.0.from: write a time",
    "version: 1\nguard: {freeze: [{from: '18:00', to: '06:00+02:00'}]}\n": (
        "p.yaml:2:38: guard.freeze.0.to: write a time"
    ),
    "version: 1\nguard: {freeze: [{from: '18:00', to: '06:00', zone: Mars/Base}]}\n": (
        "p.yaml:2:53: guard.freeze.0.zone: no time zone is called 'Mars/Base'"
    ),
    "version: 1\ntuners:\n  tier_size: {min: {dram: 4GiB}, max: {dram: 1GiB}}\n": (
        "p.yaml:3:14: tuners.tier_size: dram: min 4.0 GiB is above max 1.0 GiB"
    ),
    "version: 1\nbudgets: {dram: 1GiB, total: 2GiB}\n": "p.yaml:2:10: budgets: give either total or budgets by tier",
    "version: 1\ntuners:\n  eviction: {candidates: [lru, fifo]}\n": "p.yaml:3:32: tuners.eviction.candidates.1: Input",
    "version: 1\ntuners:\n  remote_fetch: {enable_after: 241}\n": (
        "p.yaml:3:32: tuners.remote_fetch.enable_after: Input should be less than or equal to 240"
    ),
    "version: 1\noverrides:\n- tuners: {}\n": "p.yaml:3:3: overrides.0.match: Field required",
    "version: 1\noverrides:\n- match: {sotre: a}\n": (
        "p.yaml:3:11: overrides.0.match.sotre: unknown key: did you mean store?"
    ),
    "version: 1\ntuners: {tier_size: {min: {dram: 4GiB}}}\n" + LAID_OVER: (
        "p.yaml:4:1: overrides: entry 0, laid over the rest: tuners.tier_size: "
    ),
    "version: 1\n" + TWO.format("h*", "*a"): (
        "p.yaml:3:1: overrides: entry 0 and entry 1, laid over the rest: tuners.tier_size: dram: min 2.0 GiB"
    ),
    "version: 1\n  mode: auto\n": "p.yaml:2:7: not YAML: mapping values are not allowed",
    "- 1\n": "p.yaml:1:1: Input should be keys with values",
}


@pytest.mark.parametrize(("text", "said"), MISTAKES.items())
def test_a_bad_file_is_told_with_its_place(tmp_path, text, said):
    """Every kind of mistake is named with file, line, column and field."""
    assert [p for p in problems(tmp_path, text) if p.startswith(said)]


@pytest.mark.parametrize(
    "stores",
    [("a", "a*"), ("?", "a"), ("*a", "*-a"), ("*-a", "*b-a"), ("*x*", "a*"), ("a*b-c", "*b*c"), ("*b*c", "a*b-c")],
)
def test_overrides_that_one_target_fits_both_must_not_contradict(policy_of, stores):
    """Whatever the patterns have in common: a name, a start, an end, or nothing that rules the other out."""
    with pytest.raises(DocumentError, match="entry 0 and entry 1, laid over the rest"):
        policy_of("version: 1\n" + TWO.format(*stores))


@pytest.mark.parametrize(
    "stores", [("a", "b"), ("a", "a?"), ("gpu-a*", "gpu-b*"), ("*-a", "*-b"), ("a*", "ba"), ("*x*-a", "*x*-b")]
)
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


def test_the_shipped_schema_is_up_to_date():
    """policies/schema.json is what the code says (python -m reference.build)."""
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
