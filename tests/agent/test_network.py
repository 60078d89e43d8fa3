"""Many asked at once, and what a failure is told as."""

import httpx

from tiertune_agent.network import at_once, said


def test_all_are_asked_and_answer_in_their_order():
    """More than are asked at a time; and of none comes nothing."""
    assert at_once(lambda number: -number, range(40)) == [-number for number in range(40)]
    assert at_once(lambda number: -number, []) == []


def test_a_failure_without_a_message_is_told_by_its_kind():
    """An empty reason tells nobody anything."""
    assert said(httpx.ReadTimeout("")) == "ReadTimeout"
    assert said(httpx.ReadTimeout("too late")) == "too late"
