"""The command line. Everything but typer is imported where it is used, so that ``--help`` is quick."""

# ruff: noqa: PLC0415
# ruff: noqa: PLR0917 (typer calls commands by keyword)

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

app = typer.Typer(
    name="tiertune",
    help="Shares KV-cache chunks between LLM engines, measures what every tier earns, keeps the tiers rightly set.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
store_app = typer.Typer(help="The store: one process per host.", no_args_is_help=True)
agent_app = typer.Typer(help="The agent: one leads per fleet.", no_args_is_help=True)
policy_app = typer.Typer(help="Policy files: what the agent may do.", no_args_is_help=True)
decisions_app = typer.Typer(help="Change control.", no_args_is_help=True)
database_app = typer.Typer(help="The agent's history.", no_args_is_help=True)
dashboards_app = typer.Typer(help="The dashboards for Grafana.", no_args_is_help=True)
for name, group in (
    ("store", store_app),
    ("agent", agent_app),
    ("policy", policy_app),
    ("decisions", decisions_app),
    ("db", database_app),
    ("dashboards", dashboards_app),
):
    app.add_typer(group, name=name)

Config = Annotated[Path, typer.Option(help="YAML file.")]
AgentUrl = Annotated[str, typer.Option("--agent", envvar="TIERTUNE_AGENT", help="Where the agent serves.")]


def _writable(path: Path | None) -> Path | None:
    """Told before the work, not after it."""
    if path and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{path} is a folder" if path.is_dir() else f"the folder of {path} does not exist")
    return path


Json = Annotated[
    Path | None, typer.Option("--json", help="Write the result there.", metavar="PATH", callback=_writable)
]
AGENT = "http://127.0.0.1:7420"


@store_app.command("serve")
def store_serve(config: Config) -> None:
    """Serve this host's engines until told to end."""
    from tiertune_connector.serve.main import serve
    from tiertune_connector.settings import load

    serve(load(config))


@agent_app.command("run")
def agent_run(
    config: Config, dry_run: Annotated[bool, typer.Option(help="Decide, but leave the stores' tuning alone.")] = False
) -> None:
    """Tune the fleet until told to end."""
    from tiertune_agent.run import run
    from tiertune_agent.settings import load

    run(load(config), dry_run=dry_run)


@app.command()
def demo(
    seconds: Annotated[int, typer.Option(min=60, help="How long.")] = 90,
    trace: Annotated[Path | None, typer.Option(help="Parquet trace; left out: one that comes along.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the page.")] = 7420,
    json_path: Json = None,
) -> None:
    """Two hosts, four engines, a remote tier, the agent and its page, fed by a real trace."""
    from tiertune_agent.demo import run_demo

    raise typer.Exit(run_demo(seconds, trace, port, json_path))


@app.command()
def curve(
    trace: Annotated[Path, typer.Argument(help="Parquet trace.")],
    sizes: Annotated[str, typer.Option(help="Shares of the unique blocks, such as 0.01,0.03.")],
    algorithm: Annotated[str, typer.Option(help="lru, arc, s3fifo, fifo or opt.")] = "lru",
    sampled: Annotated[float | None, typer.Option(help="Rate of sampled blocks; left out: exact.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 1,
    json_path: Json = None,
) -> None:
    """Miss-ratio curve of one cache, tail first."""
    from tiertune_agent.replay.commands import curve_command

    curve_command(trace=trace, algorithm=algorithm, sizes=sizes, sampled=sampled, seed=seed, json_path=json_path)


@app.command()
def replay(
    traces: Annotated[list[Path], typer.Argument(help="Parquet traces.", metavar="TRACE...")],
    scenarios: Annotated[
        list[Path], typer.Option("--scenario", help="YAML file, or a folder of them; may be given again.")
    ],
    policy: Annotated[Path | None, typer.Option(help="YAML file: what the run tuned may do.")] = None,
    runs: Annotated[str, typer.Option("--run", help="Names, with commas; left out: all.")] = "",
    json_path: Json = None,
    html_path: Annotated[
        Path | None, typer.Option("--html", help="Write a report there.", metavar="PATH", callback=_writable)
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Of traces and scenarios at once.")] = 1,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster to spread them over.")] = None,
) -> None:
    """Replay traces under a virtual clock: every trace under every scenario."""
    from tiertune_agent.replay.commands import replay_command

    replay_command(
        traces=traces,
        scenarios=scenarios,
        policy=policy,
        runs=runs,
        json_path=json_path,
        html_path=html_path,
        processes=processes,
        ray=ray,
    )


@app.command()
def plan(fleet: Annotated[Path, typer.Option(help="YAML file.")], json_path: Json = None) -> None:
    """Closed form: bandwidth needed, break-even length, is sharing worth it here."""
    from tiertune_agent.plan import Fleet
    from tiertune_agent.plan import plan as planned
    from tiertune_agent.tables import plan_table, show
    from tiertune_connector.documents import load_yaml

    made = planned(load_yaml(fleet, Fleet))
    show(plan_table(made))
    _result(made.document(), json_path, lambda: typer.echo(f"\n{made.verdict}"))


@policy_app.command("check")
def policy_check(file: Annotated[Path, typer.Argument(help="YAML file.")]) -> None:
    """Lint a policy file; every problem with its line and column."""
    from tiertune_agent.policy import load, without_effect

    loaded = load(file)
    for note in without_effect(loaded.policy):
        typer.echo(f"{file}: note: {note}")
    typer.echo(f"{file}: good")


@policy_app.command("backtest")
def policy_backtest(
    file: Annotated[Path, typer.Argument(help="YAML file.")],
    trace: Annotated[Path | None, typer.Option(help="Parquet trace; with --scenario.")] = None,
    scenario: Annotated[Path | None, typer.Option(help="YAML file.")] = None,
    history: Annotated[str | None, typer.Option(help="The agent's database, such as sqlite:///agent.sqlite.")] = None,
    last: Annotated[str, typer.Option(help="How much of the history; a day of one store takes minutes.")] = "6h",
    json_path: Json = None,
) -> None:
    """What would this policy have done: over a trace, or over recorded history. Nothing is changed."""
    if history and not trace and not scenario:
        from tiertune_agent.backtest import backtest
        from tiertune_agent.policy import load
        from tiertune_connector.units import parse_duration

        try:
            last_s = parse_duration(last)
        except ValueError as error:
            fail(f"--last: {error}", 2)
        told = backtest(history, load(file), last_s)
        _result(told.document(), json_path, lambda: typer.echo("\n".join(told.sentences())))
    elif trace and scenario and not history:
        from tiertune_agent.replay.commands import backtest_command

        backtest_command(policy=file, trace=trace, scenario=scenario, json_path=json_path)
    else:
        fail("give either --trace and --scenario, or --history", 2)


@policy_app.command("schema")
def policy_schema(
    out: Annotated[Path | None, typer.Option(help="Write it there.")] = None,
    check: Annotated[Path | None, typer.Option(help="Fail unless this file is up to date.")] = None,
) -> None:
    """JSON Schema of policy files, for editors."""
    from tiertune_agent.policy import schema

    if check:
        if not check.is_file() or check.read_text(encoding="utf-8") != schema():
            fail(f"{check} is not up to date: run tiertune policy schema --out {check}", 1)
    elif out:
        out.write_text(schema(), encoding="utf-8")
    else:
        typer.echo(schema(), nl=False)


@decisions_app.command("list")
def decisions_list(
    agent: AgentUrl = AGENT,
    state: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 50,
    json_path: Json = None,
) -> None:
    """Newest first."""
    from tiertune_agent.tables import decisions_table, show

    query = f"?limit={limit}" + (f"&state={state}" if state else "")
    document = _agent("GET", agent, f"/api/v1/decisions{query}")
    _result(document, json_path, lambda: show(decisions_table(document["decisions"])))


@decisions_app.command("show")
def decisions_show(number: int, agent: AgentUrl = AGENT, json_path: Json = None) -> None:
    """One decision with its evidence."""
    from tiertune_agent.tables import decision_table, show

    document = _agent("GET", agent, f"/api/v1/decisions/{number}")
    _result(document, json_path, lambda: show(decision_table(document)))


@decisions_app.command("approve")
def decisions_approve(number: int, agent: AgentUrl = AGENT, json_path: Json = None) -> None:
    """Make a proposed change now."""
    document = _agent("POST", agent, f"/api/v1/decisions/{number}/approve")
    _result(document, json_path, lambda: typer.echo(f"decision {number} is {document['state']}: {document['reason']}"))
    if document["state"] not in ("approved", "applied", "soaking"):
        raise typer.Exit(1)


@decisions_app.command("reject")
def decisions_reject(number: int, agent: AgentUrl = AGENT, json_path: Json = None) -> None:
    """Say no to a proposed change."""
    document = _agent("POST", agent, f"/api/v1/decisions/{number}/reject")
    _result(document, json_path, lambda: typer.echo(f"decision {number} is rejected"))


@decisions_app.command("rollback")
def decisions_rollback(number: int, agent: AgentUrl = AGENT, json_path: Json = None) -> None:
    """Undo a change that was made, if its value still stands."""
    document = _agent("POST", agent, f"/api/v1/decisions/{number}/rollback")
    done = document["state"] == "rolled_back"
    told = "is rolled back" if done else "is being rolled back: the store has not answered yet"
    _result(document, json_path, lambda: typer.echo(f"decision {number} {told}"))


@app.command()
def freeze(
    reason: Annotated[str, typer.Option(help="Shown to everyone who asks.")],
    duration: Annotated[str | None, typer.Option("--for", help="Such as 2h; left out: until unfreeze.")] = None,
    agent: AgentUrl = AGENT,
    json_path: Json = None,
) -> None:
    """Nothing changes any more."""
    body = {"reason": reason} | ({"for": duration} if duration else {})
    document = _agent("POST", agent, "/api/v1/freeze", body)
    until = f"until {document['until']}" if document["until"] else "until tiertune unfreeze"
    _result(document, json_path, lambda: typer.echo(f"frozen {until}"))


@app.command()
def unfreeze(agent: AgentUrl = AGENT, json_path: Json = None) -> None:
    """Lift every freeze that was commanded."""
    document = _agent("POST", agent, "/api/v1/unfreeze")
    _result(document, json_path, lambda: typer.echo(f"lifted {document['lifted']}"))


@app.command()
def bypass(
    switch: Annotated[str, typer.Argument(help="on or off", metavar="on|off")],
    store: Annotated[str | None, typer.Option(help="A name; or an http:// address, to go there straight.")] = None,
    agent: AgentUrl = AGENT,
    json_path: Json = None,
) -> None:
    """Stores answer miss and engines recompute, until it is off again."""
    if switch not in ("on", "off"):
        fail(f"write on or off, not {switch!r}", 2)
    body: dict[str, Any] = {"on": switch == "on"}
    if store and "://" in store:
        from tiertune_agent.client import call

        document = call("POST", store, "/v1/bypass", body, what="store")
        _result(document, json_path, lambda: typer.echo(f"{store}: bypass is {switch}"))
        return
    document = _agent("POST", agent, "/api/v1/bypass", body | {"store": store})
    _result(document, json_path, lambda: _say_stores(document["stores"], f"bypass is {switch}"))
    if set(document["stores"].values()) - {"ok"}:
        fail("not all stores answered; the agent tells them again every window until they do", 1)


@app.command()
def flush(
    namespace: Annotated[str | None, typer.Option(help="Only this namespace (digest).")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant (digest).")] = None,
    epoch: Annotated[int | None, typer.Option(help="Only this epoch.")] = None,
    agent: AgentUrl = AGENT,
    json_path: Json = None,
) -> None:
    """Drop chunks in all stores, acknowledged one by one."""
    body = {"namespace": namespace, "tenant": tenant, "epoch": epoch}
    document = _agent("POST", agent, "/api/v1/flush", {key: value for key, value in body.items() if value is not None})
    told = {name: _dropped(ack) for name, ack in document["stores"].items()}
    _result(document, json_path, lambda: _say_stores(told, "flushed"))
    if not document["complete"]:
        fail("not all stores acknowledged", 1)


@database_app.command("upgrade")
def database_upgrade(
    config: Annotated[Path | None, typer.Option(help="The agent's YAML file.")] = None,
    database: Annotated[
        str, typer.Option(envvar="TIERTUNE_DATABASE", show_envvar=False, help="Its address.")
    ] = "sqlite:///tiertune.sqlite",
    password_file: Annotated[Path | None, typer.Option(help="PostgreSQL's password.")] = None,
) -> None:
    """Bring the agent's history to this version's schema."""
    from tiertune_agent.history.database import connect, shown, upgrade
    from tiertune_agent.settings import load

    if config:
        settings = load(config)
        database, password_file = settings.database, settings.database_password_file
    engine = connect(database, password_file)
    before, after = upgrade(engine)
    engine.dispose()
    was = "already" if before == after else f"was {before or 'empty'}, now"
    typer.echo(f"{shown(database)}: {was} at revision {after}")


@dashboards_app.command("preview")
def dashboards_preview(
    prometheus: Annotated[
        str, typer.Option(envvar="TIERTUNE_PROMETHEUS", help="Where Prometheus serves.")
    ] = "http://127.0.0.1:9090",
    out: Annotated[Path | None, typer.Option(help="Write the pages into this folder; left out: serve them.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where to serve them.")] = 7430,
    last: Annotated[str, typer.Option(help="How far back.")] = "1h",
    until: Annotated[str, typer.Option(help="Time (UTC), such as 2025-03-05T12:00; left out: now.")] = "",
    store: Annotated[str, typer.Option(help="Only these stores, such as host-a|host-b; left out: all.")] = "",
    namespace: Annotated[str, typer.Option(help="Only these namespaces (digests); left out: all.")] = "",
) -> None:
    """The dashboards with a Prometheus's real results, on pages of our own: no Grafana needed."""
    from tiertune_agent.preview.commands import preview_command

    preview_command(
        prometheus=prometheus,
        out=out,
        port=port,
        last=last,
        until=until,
        store=store,
        namespace=namespace,
        say=typer.echo,
    )


def fail(message: str, code: int) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code)


def _agent(method: str, url: str, path: str, body: object = None) -> Any:  # noqa: ANN401 (JSON)
    from tiertune_agent.client import call

    return call(method, url, path, body)


def _result(document: object, json_path: Path | None, say: Callable[[], object]) -> None:
    say()
    if json_path:
        json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _say_stores(told: dict[str, str], done: str) -> None:
    for store, outcome in sorted(told.items()):
        typer.echo(f"{store}: {done if outcome == 'ok' else outcome}")
    if not told:
        typer.echo("the agent knows no store yet")


def _dropped(acknowledged: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} in {tier}" for tier, count in acknowledged["dropped"].items())
    told = f"flushed {counts or 'nothing'}"
    return told if acknowledged["ok"] else f"{told}; {acknowledged['reason']}"


def main() -> None:
    """Entry point: a failure is one message and an exit status, never a traceback."""
    try:
        app()
    except ModuleNotFoundError as error:
        typer.echo(f"{error.name} is not installed: pip install 'tiertune[agent]'", err=True)
        sys.exit(1)
    except (ValueError, RuntimeError, OSError) as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("tiertune_"):
            raise  # not an error that was written for people
        typer.echo(str(error), err=True)
        sys.exit(2 if isinstance(error, ValueError) else 1)
