"""The whole loop on one machine: two hosts, four engines, a remote that is slowed for a third of the time, an agent."""

from pathlib import Path


def run_demo(seconds: int, trace: Path | None, port: int, json_path: Path | None) -> int:
    """Run the demo; returns the exit status: 0 shown or ended early by the user, 1 not shown, 2 wrong input.

    ``trace`` None takes a shipped one, ``port`` 0 a free one for the page; ``json_path`` gets the result.
    """
    from tiertune_agent.demo.run import run  # noqa: PLC0415 (the demo's child processes need none of it)

    return run(seconds, trace, port, json_path)
