"""What the page shows of the policy: its text, and what is wrong or without effect in it."""

import pytest

from agent.agents import POLICY
from tiertune_agent.policy.document import load
from tiertune_agent.policy.lint import errors, notes
from tiertune_connector.documents import place_of

SOUND = """version: 1
objectives: {ttft_p99: 2s}
overrides:
  - match: {store: "gpu-*"}
    budgets:
      remote: 3GiB
"""


def test_notes_have_places(tmp_path):
    """A key without effect is named with file, line and column."""
    path = tmp_path / "p.yaml"
    path.write_text(SOUND)
    assert [one.place.removeprefix(str(path)) for one in notes(load(path))] == [":2:1", ":6:7"]


def test_errors_keep_theirs():
    """Each line of a document's problems becomes its place and what to mend; others stand by the file."""
    found = list(errors("p.yaml:2:7: mode: wrong\np.yaml: cannot be read", "p.yaml"))
    assert [(one.place, one.message) for one in found] == [
        ("p.yaml:2:7", "mode: wrong"),
        ("p.yaml", "p.yaml: cannot be read"),
    ]


@pytest.mark.parametrize(("field", "place"), [("a.b", "2:3"), ("a.c", "1:1"), ("l.1.x", "3:10"), ("no", "1:1")])
def test_a_place_is_found_as_far_as_it_is_written(field, place):
    """Of a key that is not there, that of the last one on the way."""
    assert place_of("a:\n  b: 1\nl: [{}, {x: 1}]\n", field) == place


def test_what_has_no_effect_is_told_with_its_place(policy_file, rounds, seen):
    """The policy is in force all the same."""
    policy_file.write_text(POLICY + SOUND.replace("version: 1\n", ""))
    rounds(1)
    told = seen().policy
    assert [(one["level"], one["message"].partition(":")[0]) for one in told["lint"]] == [
        ("note", "objectives"),
        ("note", "overrides.0.budgets.remote"),
    ]
    assert told["problem"] is None


def test_a_bad_edit_is_told_with_its_place(policy_file, rounds, seen):
    """What is in force stays the last good one; each error has its place in the newer file."""
    rounds(1)
    policy_file.write_text("version: 1\nmode: sometimes\nspeed: 3\n")
    rounds(1)
    told = seen().policy
    assert told["problem"]
    assert [one["place"].rpartition("yaml")[2] for one in told["lint"]] == [":2:7", ":3:1"]
    assert told["text"] == POLICY
