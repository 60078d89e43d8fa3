"""The command line. Everything but typer is imported where it is used, so that ``--help`` is quick."""

# ruff: noqa: PLC0415
# ruff: noqa: PLR0917 (typer calls commands by keyword)

import sys
from dataclasses import asdict
from errno import ENAMETOOLONG
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from tiertune_agent.cli_control import control_app, decisions_app
from tiertune_agent.preview.commands import dashboards_app
from tiertune_agent.replay.commands import backtest, curve, replay
from tiertune_agent.terminal.options import (
    AGENT,
    TRACE,
    Config,
    InputError,
    JsonPath,
    fail,
    heard,
    parsed,
    printable,
    result,
    say,
    server,
)

PolicyFile = Annotated[Path, typer.Argument(help="YAML file.", metavar="FILE")]
app = typer.Typer(
    name="tiertune",
    help="Shares KV-cache chunks between LLM engines, measures what every tier earns, and tunes the tiers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
store_app = typer.Typer(help="The store: one process per host.", no_args_is_help=True)
agent_app = typer.Typer(help="The agent: one per fleet leads.", no_args_is_help=True)
policy_app = typer.Typer(help="Policy files: what the agent may do.", no_args_is_help=True)
database_app = typer.Typer(help="The agent's history.", no_args_is_help=True)
for name, group in (
    ("store", store_app),
    ("agent", agent_app),
    ("policy", policy_app),
    ("decisions", decisions_app),
    ("db", database_app),
    ("dashboards", dashboards_app),
):
    app.add_typer(group, name=name)
app.add_typer(control_app)


def _tell_version(asked: bool) -> None:
    if asked:
        from tiertune_connector import __version__

        typer.echo(f"tiertune {__version__}")
        raise typer.Exit


@app.callback()
def _any_command(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_tell_version)] = False,
) -> None:
    pass


@store_app.command("serve")
def store_serve(config: Config) -> None:
    """Serve this host's engines until stopped."""
    from tiertune_connector.serve.main import serve
    from tiertune_connector.settings import load

    serve(load(config))


@agent_app.command("run")
def agent_run(config: Config) -> None:
    """Tune the fleet until stopped."""
    from tiertune_agent.run import run
    from tiertune_agent.settings import load

    run(load(config))


@app.command()
def demo(
    seconds: Annotated[int, typer.Option(min=60, help="Length of the run.")] = 90,
    trace: Annotated[Path | None, typer.Option(help=f"{TRACE} By default the first of these.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 picks a free one.")] = 7420,
    json_path: JsonPath = None,
) -> None:
    """Run two hosts, four engines, a remote tier, the agent and its page, fed by a real trace."""
    from tiertune_agent.demo.run import run

    raise typer.Exit(run(seconds, trace, port, json_path))


app.command()(curve)
app.command()(replay)


@app.command()
def plan(fleet: Annotated[Path, typer.Option(help="YAML file.")], json_path: JsonPath = None) -> None:
    """Compute in closed form the bandwidth needed, the break-even length, and whether sharing is worth it."""
    from tiertune_agent.plan import PlannedFleet, rows
    from tiertune_agent.plan import plan as planned
    from tiertune_agent.terminal.tables import pairs, show
    from tiertune_connector.documents import load_yaml

    made = planned(load_yaml(fleet, PlannedFleet))
    show(pairs(rows(made)))
    say(f"\n{made['verdict']}", made, json_path)


@app.command()
def doctor(
    agent: Annotated[
        str | None, typer.Option("--agent", envvar="TIERTUNE_AGENT", help="The agent's address; it knows its stores.")
    ] = None,
    configs: Annotated[
        list[Path] | None, typer.Option("--config", help="Settings of the agent or of a store; repeatable.")
    ] = None,
    engine: Annotated[list[str] | None, typer.Option(help="Address of a vLLM server; repeatable.")] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="Storage to measure: redis://host:port/0 or file:///folder, as in a store's settings."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model for the storage's break-even, as in a scenario.")] = "llama-3-70b",
    gpu: Annotated[str, typer.Option(help="GPU that would recompute instead, as in a scenario.")] = "h100x8",
    json_path: JsonPath = None,
) -> None:
    """Name what is wrong and how to fix it; with --storage, measure one too. Exits with 1 if something is wrong."""
    from tiertune_agent.doctor.command import Endpoints, examine, is_store, known, tell, weighed
    from tiertune_agent.doctor.facts import StorageFacts
    from tiertune_agent.engines import addresses
    from tiertune_agent.settings import load as load_agent
    from tiertune_agent.terminal.progress import bar
    from tiertune_connector.serve import measure
    from tiertune_connector.settings import load as load_store

    asked = Endpoints(engines=list(addresses(engine or ())))
    if agent is not None:
        asked.agent = server("--agent", "agent", agent)
    like = None
    for path in configs or ():
        if is_store(path):
            settings = load_store(path)
            asked.add_store(settings.name, settings.state_dir)
            like = settings.remote or like
            if settings.remote and not settings.remote.medium:
                asked.add_remote(settings.remote.url, settings.remote, settings.remote.timeout)
        else:
            asked.add_agent(load_agent(path))
    measured = None
    if storage is not None:
        known(model=model, gpu=gpu)
        named = measure.storage(storage, like)
        with bar("measuring", measure.OPERATIONS) as progress:
            timed = measure.measure(named, step=progress.step)
        measured = weighed(StorageFacts(**asdict(timed)), model=model, gpu=gpu)
    elif agent is None and not (configs or engine):
        asked.agent = AGENT
    if not tell(examine(asked, measured), json_path):
        raise typer.Exit(1)


@app.command()
def prewarm(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="A .jsonl file has one document per line; any other file is one document.", metavar="FILE..."
        ),
    ],
    engine: Annotated[list[str], typer.Option(help="Address of a vLLM server; repeatable.")],
    model: Annotated[str, typer.Option(help="Model to ask; by default the engine's first.")] = "",
    salt: Annotated[str, typer.Option(help="The tenant's cache_salt.")] = "",
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests at once to each engine.")] = 4,
    json_path: JsonPath = None,
) -> None:
    """Have engines compute documents before anybody asks for them. Exits with 1 if a document failed."""
    from tiertune_agent.prewarm import prewarm_command

    document = prewarm_command(files, engine, model=model, salt=salt, concurrency=concurrency)
    result(document, json_path)
    if document["failed"]:
        raise typer.Exit(1)


@policy_app.command("check")
def policy_check(file: PolicyFile, json_path: JsonPath = None) -> None:
    """Check a policy file; show every problem with its line and column."""
    from tiertune_agent.policy.lint import checked

    findings, problem = checked(file)
    document = {"file": str(file), "good": not problem, "lint": [vars(one) for one in findings]}
    told = [f"{one.place}: note: {one.message}" for one in findings] + [f"{file}: good"]
    result(document, json_path)
    if problem:
        fail(problem, 2)
    typer.echo("\n".join(told))


@policy_app.command("backtest")
def policy_backtest(
    file: PolicyFile,
    trace: Annotated[Path | None, typer.Option(help=f"{TRACE} With --scenario.")] = None,
    scenario: Annotated[Path | None, typer.Option(help="YAML file.")] = None,
    history: Annotated[str | None, typer.Option(help="The agent's database, such as sqlite:///agent.sqlite.")] = None,
    last: Annotated[
        str | None, typer.Option(help="How much of the history, by default 6h; a day of one store takes minutes.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Show what this policy would have done over a trace or recorded history. Changes nothing."""
    if history and trace is None and scenario is None:
        _over_history(file, history, "6h" if last is None else last, json_path)
    elif trace and scenario and history is None and last is None:
        backtest(file, trace, scenario, json_path)
    else:
        fail("give either --trace and --scenario, or --history and, if wanted, --last", 2)


def _over_history(policy: Path, history: str, last: str, json_path: Path | None) -> None:
    """Print, and write to ``json_path``, what the policy would have done in the ``last`` of the history at a URL."""
    from tiertune_agent.backtest.run import LONGEST_S, backtest
    from tiertune_agent.policy.document import load
    from tiertune_agent.terminal.tables import backtest_table, show
    from tiertune_connector.units import parse_duration

    last_s = parsed("--last", parse_duration, last)
    if not 0 < last_s <= LONGEST_S:
        raise InputError("--last: more than nothing, and at most 36500d, such as 6h")
    told = backtest(history, load(policy), last_s)
    typer.echo("\n".join(printable(told.sentences())))
    show(backtest_table(printable([list(row) for row in told.rows()]), "by"))
    result(told.document(), json_path)


@database_app.command("upgrade")
def database_upgrade(config: Config = Path("agent.yaml"), json_path: JsonPath = None) -> None:
    """Upgrade the database that an agent's settings name to this version's schema."""
    from tiertune_agent.history.database import connect, shown, upgrade
    from tiertune_agent.settings import load

    settings = load(config)
    name, engine = shown(settings.database), connect(settings.database, settings.database_password_file)
    before, after = upgrade(engine)
    engine.dispose()
    was = "already" if before == after else f"was {before or 'empty'}, now"
    document = {"database": name, "before": before, "after": after}
    say(f"{name}: {was} at revision {after}", document, json_path)


def main() -> None:
    """Entry point: a failure is one message and an exit status, never a traceback."""
    from tiertune_connector.ending import heed_sigterm

    heed_sigterm()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: a name may have what the locale lacks
        if sys.stdout is sys.__stdout__:
            sys.stdout = heard(sys.stdout)
    try:
        app()
    except ModuleNotFoundError as error:
        typer.echo(f"{error.name} is not installed: pip install 'tiertune[agent]'", err=True)
        sys.exit(1)
    except (ValueError, RuntimeError, OSError) as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("tiertune_"):
            raise  # not an error that was written for people
        from tiertune_connector.documents import where

        typer.echo(printable(where(error) if isinstance(error, OSError) else str(error)), err=True)
        wrong = isinstance(error, ValueError) or getattr(error, "errno", None) == ENAMETOOLONG
        sys.exit(2 if wrong else 1)
