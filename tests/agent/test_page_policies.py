"""What the page shows of the policy: its text, what is wrong or without effect in it, modes, and whom overrides fit."""

import pytest

from agent.agents import POLICY
from tiertune_agent.policy.document import load
from tiertune_agent.policy.lint import errors, notes
from tiertune_agent.web.policies import policy_view
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


def test_the_view_tells_modes_and_who_fits(policy_file, store, rounds, seen):
    """Each tuner with its mode and answers; an override with its stores; a noted line is marked."""
    policy_file.write_text(POLICY + SOUND.replace("version: 1\n", "").replace("gpu-*", "host-*"))
    rounds(2)
    told = policy_view(seen())
    asked = {one.tuner: one for one in told.asked}
    assert (asked["remote_fetch"].modes, asked["remote_fetch"].targets) == (("auto",), 1)
    assert asked["tier_size"].modes == ("recommend",)
    assert [(one.match, one.keys, one.fits) for one in told.overlays] == [("store host-*", "budgets.remote", "host-a")]
    assert [told.text[number - 1] for number in sorted(told.noted)] == [
        "objectives: {ttft_p99: 2s}",
        "      remote: 3GiB",
    ]
    assert told.sound


@pytest.mark.parametrize(
    ("match", "fits"),
    [("{store: fleet}", "fleet"), ('{model: "lla*"}', "host-a"), ("{model: nothing}", "")],
)
def test_overrides_fit_pools_and_the_remote_too(policy_file, rounds, seen, match, fits):
    """The remote is called fleet; a pattern of a model fits the pools of that model."""
    policy_file.write_text(f"{POLICY}overrides: [{{match: {match}, mode: observe}}]\n")
    rounds(1)
    assert [one.fits for one in policy_view(seen()).overlays] == [fits]


def test_a_bad_edit_is_told_with_its_place(policy_file, rounds, seen):
    """What is in force stays the last good one; each error has its place in the newer file."""
    rounds(1)
    policy_file.write_text("version: 1\nmode: sometimes\nspeed: 3\n")
    rounds(1)
    told = policy_view(seen())
    assert not told.sound
    assert [one.place.rpartition("yaml")[2] for one in told.findings] == [":2:7", ":3:1"]
    assert "\n".join(told.text) == POLICY.rstrip("\n")
