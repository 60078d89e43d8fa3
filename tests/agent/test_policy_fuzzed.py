"""Policy files that nobody would write on purpose: understood, or refused with a place; never an error of ours."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.policies import CONTRACT
from tiertune_agent.policy.document import Policy, followed, load
from tiertune_agent.policy.lint import without_effect
from tiertune_agent.records import Target
from tiertune_connector.documents import DocumentError

pytestmark = pytest.mark.slow

ODD = ["null", "~", "&a", "*a", "<<", "0x7f", "1e400", ".inf", ".nan", "-1", "9" * 400, "1s", "1ZiB", "\u2028"]
TAGS = ["!!set", "!!bool", "!!int", "!!timestamp"]
WORDS = [*re.findall(r"[\w.*-]+|[{}\[\],:\n]", CONTRACT), *ODD, *TAGS, "\x00", "\t", "---", "|", ">", "? ", "é"]
PLACED = re.compile(r"p\.yaml:\d+:\d+: ")
CUTS = st.lists(
    st.tuples(st.integers(0, len(CONTRACT)), st.integers(0, 12), st.sampled_from(WORDS)), min_size=1, max_size=4
)
TARGETS = [Target("gpu-a1", "dram", models=("llama-3",)), Target("b", "remote"), Target("fleet", "remote")]


def spoiled(cuts: list[tuple[int, int, str]]) -> str:
    """The contract's example, some pieces of it replaced."""
    text = CONTRACT
    for start, length, word in cuts:
        text = text[:start] + word + text[start + length :]
    return text


def read(path: Path) -> tuple[Policy | None, list[str]]:
    """The policy, or what is to be mended."""
    try:
        return load(path).policy, []
    except DocumentError as error:
        return None, error.problems


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=CUTS)
def test_a_spoiled_file_is_understood_or_refused(tmp_path, cuts):
    """What is understood can be asked for every target; what is not names a place to mend, line and column."""
    path = tmp_path / "p.yaml"
    path.write_bytes(spoiled(cuts).encode())
    policy, problems = read(path)
    assert all(PLACED.search(problem) for problem in problems), problems
    assert bool(problems) == (policy is None)
    if policy is None:
        return
    without_effect(policy)
    for target in TARGETS:
        policy.for_target(target)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=CUTS)
def test_a_spoiled_edit_leaves_a_policy_in_force(tmp_path, cuts):
    """An agent that runs reads its file again: the last good one stays, and the problem is told."""
    path: Path = tmp_path / "q.yaml"
    path.write_text(CONTRACT)
    file = followed(path, wait=lambda _: None)
    path.write_bytes(spoiled(cuts).encode() + b"# edited\n")
    policy = file.look().policy
    assert policy is file.content.policy
    assert bool(file.problem) == (file.content.text == CONTRACT)


def test_half_of_a_file_is_not_taken(tmp_path):
    """What a policy is before all of it is written may allow more: the last one stays in force until it is whole."""
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nmode: observe\n")
    file = followed(path, wait=lambda _: path.write_text(whole))
    half = "version: 1\nmode: auto\n"
    whole = half + 'overrides: [{match: {store: "*"}, mode: observe}]\n'
    path.write_text(half)
    assert (file.look().policy.mode, file.problem) == ("observe", "")
    assert [override.mode for override in file.look().policy.overrides] == ["observe"]
