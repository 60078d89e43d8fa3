"""``tiertune policy backtest --history``: check arguments, print and write what a policy would have done."""

from pathlib import Path

import typer

from tiertune_agent.backtest.run import backtest
from tiertune_agent.policy.document import load
from tiertune_agent.terminal.options import InputError, parsed, printable, result
from tiertune_agent.terminal.tables import backtest_table, show
from tiertune_connector.units import parse_duration

LONGEST_S = 36500 * 86400.0
"""Longest time that may be asked of a history."""


def history_command(*, policy: Path, history: str, last: str, json_path: Path | None) -> None:
    """Print, and write to ``json_path``, what the policy would have done in the ``last`` of the history at a URL."""
    last_s = parsed("--last", parse_duration, last)
    if not 0 < last_s <= LONGEST_S:
        raise InputError("--last: more than nothing, and at most 36500d, such as 6h")
    told = backtest(history, load(policy), last_s)

    def say() -> None:
        typer.echo(printable(told.sum()))
        show(backtest_table(printable([list(row) for row in told.rows()])))
        for note in told.notes():
            typer.echo(note)

    result(told.document(), json_path, say)
