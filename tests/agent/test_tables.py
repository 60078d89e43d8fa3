"""Tables of the command line show what others wrote as they wrote it, brackets too."""

import re

import pytest
from rich.console import Console

from tiertune_agent.doctor import report
from tiertune_agent.doctor.facts import AllFacts
from tiertune_agent.doctor.finding import Finding
from tiertune_agent.terminal.tables import audit_table, decision_table, decisions_table, terminal

WRITTEN = "[prod] freeze until [/b] Monday: [Errno 111] refused"
DECISION = {
    "id": 7,
    "created_at": "2026-03-05T12:00:07+00:00",
    "tuner": "tier_size",
    "store": "[::1]:9400",
    "tier": "disk",
    "field": "pools.0f.disk.capacity_bytes",
    "from": None,
    "to": 4 << 30,
    "state": "rejected",
    "reason": WRITTEN,
}
COMMAND = {"at": "2026-03-05T12:00:07+00:00", "who": "op", "from": "[::1]", "what": "freeze", "detail": WRITTEN}


def printed(table, width=200):
    """What a terminal of so many columns shows."""
    console = Console(width=width)
    with console.capture() as shown:
        console.print(table)
    return shown.get()


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (decisions_table([DECISION]), [WRITTEN, "[::1]:9400", "2026-03-05 12:00:07", "None", "disk", "4.0 GiB"]),
        (decision_table(DECISION), [WRITTEN, "[::1]:9400"]),
        (audit_table([COMMAND]), [WRITTEN, "[::1]"]),
    ],
)
def test_what_stands_in_brackets_is_no_markup(table, told):
    """An operator's reason, an address, the text of an error."""
    shown = printed(table)
    for each in told:
        assert each in shown


def test_a_decision_is_shown_with_units_and_without_what_has_not_come_yet():
    """As in the list; a split of several tiers stays the document that it is."""
    bare = {**DECISION, "waits": None, "verdicts": [], "approved_by": "", "version": 0}
    told = printed(decision_table(bare)) + printed(decision_table({**DECISION, "from": {"dram": 1}, "to": {"dram": 2}}))
    assert "4.0 GiB" in told
    assert "4294967296" not in told
    assert "version" in told
    assert '"dram": 2' in told
    assert not any(name in told for name in ("waits", "verdicts", "approved_by"))


def test_a_finding_commands_no_terminal(capsys):
    """Names come from stores and engines."""
    report.show(
        AllFacts("1", unknown=("\x1b[2Jone",)), [Finding("check", "error", "\x1b[1mhost", "\x9b31mwrong", "mend\x07")]
    )
    told = capsys.readouterr().out
    assert all(word in told for word in ("one", "host", "wrong", "mend"))
    assert not set(told) & {"\x1b", "\x9b", "\x07"}


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("store", ["host-a", "a-name-of-a-store-as-long-as-one-may-be-0123456789-0123456789-abc"])
def test_a_terminal_shows_all_of_a_decision(width, store):
    """Its id, which a command needs, and every letter of its sentence, which has lines of its own."""
    lines = printed(decisions_table([{**DECISION, "id": 4711, "store": store}]), width).splitlines()
    assert all(len(line) <= width for line in lines)
    (row,) = (place for place, line in enumerate(lines) if line.split()[0] == "4711")
    told = (line for line in lines[row + 1 :] if re.match(r" {4}\S", line))
    assert "".join(told).replace(" ", "") == WRITTEN.replace(" ", "")


@pytest.mark.parametrize("width", [80, 160, 200])
def test_values_stand_below_their_names(width):
    """In every row, however long what others have there is."""
    rows = [{**DECISION, "id": number, "tuner": tuner} for number, tuner in ((7, "eviction"), (4711, "remote_fetch"))]
    names, *lines = printed(decisions_table(rows), width).splitlines()
    told = [line for line in lines if line[0].isdigit()]
    assert len(told) == 2
    for name, value in (("at (UTC)", "2026-03-05"), ("store", "[::1]:"), ("tier ", "disk"), ("state", "reje")):
        assert {line.index(value) for line in told} == {names.index(name)}


@pytest.mark.parametrize("width", [80, 200])
def test_no_decisions_are_told_as_such(width):
    """In a word, not as an empty table."""
    assert printed(decisions_table([]), width) == "no decisions\n"


def test_the_number_of_a_line_is_no_emoji(capsys):
    """``:100:`` between colons stays what it is."""
    terminal().print("stores.yaml:100:5: unknown key", markup=False)
    assert capsys.readouterr().out == "stores.yaml:100:5: unknown key\n"
