"""Commands to a running agent: decisions, audit, freeze, bypass, flush. ``cli`` takes them in."""

# ruff: noqa: PLC0415 (--help is quick)
# ruff: noqa: PLR0917 (typer calls commands by keyword)

from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from tiertune_agent.terminal.options import AGENT, AgentUrl, JsonPath, fail, result, say, server

Number = Annotated[int, typer.Argument(help="The decision's number in `decisions list`.", metavar="ID")]
Limit = Annotated[int, typer.Option(min=1, max=1000, help="How many, at most.")]
decisions_app = typer.Typer(help="Change control: what the agent proposed and changed.", no_args_is_help=True)
control_app = typer.Typer()
TIMEOUT_S, FLUSH_TIMEOUT_S = 30.0, 60.0
"""An agent waits for engines and for stores."""
NO_STORE = "the agent knows no store: nothing was done"


@decisions_app.command("list")
def decisions_list(
    agent: AgentUrl = AGENT,
    state: Annotated[str | None, typer.Option(help="Only decisions in this state.")] = None,
    limit: Limit = 50,
    json_path: JsonPath = None,
) -> None:
    """List decisions, newest first."""
    from tiertune_agent.terminal.tables import decisions_table, show

    query = urlencode({"limit": limit} | ({} if state is None else {"state": state}), errors="surrogateescape")
    document = _agent("GET", agent, f"/api/v1/decisions?{query}")
    show(decisions_table(document["decisions"]))
    result(document, json_path)


@decisions_app.command("show")
def decisions_show(number: Number, agent: AgentUrl = AGENT, json_path: JsonPath = None) -> None:
    """Show one decision with its evidence."""
    from tiertune_agent.terminal.tables import decision_table, show

    document = _agent("GET", agent, f"/api/v1/decisions/{number}")
    show(decision_table(document))
    result(document, json_path)


@decisions_app.command("approve")
def decisions_approve(number: Number, agent: AgentUrl = AGENT, json_path: JsonPath = None) -> None:
    """Approve a proposed change: it is made now."""
    document = _agent("POST", agent, f"/api/v1/decisions/{number}/approve")
    told = document.get("waits") or document["reason"]
    say(f"decision {number} is {document['state']}: {told}", document, json_path)
    if document["state"] not in ("approved", "applied", "soaking"):
        raise typer.Exit(1)


@decisions_app.command("reject")
def decisions_reject(number: Number, agent: AgentUrl = AGENT, json_path: JsonPath = None) -> None:
    """Reject a proposed change, or a verdict's rollback that waits for the end of a freeze."""
    document = _agent("POST", agent, f"/api/v1/decisions/{number}/reject")
    say(f"decision {number} is {document['state']}", document, json_path)


@decisions_app.command("rollback")
def decisions_rollback(number: Number, agent: AgentUrl = AGENT, json_path: JsonPath = None) -> None:
    """Undo a change that was made, if its value is still in force."""
    document = _agent("POST", agent, f"/api/v1/decisions/{number}/rollback")
    done = document["state"] == "rolled_back"
    waits = document.get("waits") or "the store has not answered yet"
    told = "is rolled back" if done else f"is being rolled back: {waits}"
    say(f"decision {number} {told}", document, json_path)


@control_app.command()
def audit(
    agent: AgentUrl = AGENT,
    limit: Limit = 50,
    json_path: JsonPath = None,
) -> None:
    """List who commanded what, from where and when; newest first."""
    from tiertune_agent.terminal.tables import audit_table, show

    document = _agent("GET", agent, f"/api/v1/audit?limit={limit}")
    show(audit_table(document["audit"]))
    result(document, json_path)


@control_app.command()
def freeze(
    reason: Annotated[str, typer.Option(help="Shown to everyone who asks.")],
    duration: Annotated[
        str | None, typer.Option("--for", help="How long, such as 2h; by default until unfreeze.")
    ] = None,
    agent: AgentUrl = AGENT,
    json_path: JsonPath = None,
) -> None:
    """Stop all changes."""
    document = _agent("POST", agent, "/api/v1/freeze", {"reason": reason, "for": duration})
    until = f"until {document['until']}" if document["until"] else "until tiertune unfreeze"
    say(f"frozen {until}", document, json_path)


@control_app.command()
def unfreeze(agent: AgentUrl = AGENT, json_path: JsonPath = None) -> None:
    """Lift every freeze set by command."""
    from tiertune_connector.units import format_count

    document = _agent("POST", agent, "/api/v1/unfreeze")
    say(f"lifted {format_count(document['lifted'], 'freeze')}", document, json_path)


@control_app.command()
def bypass(
    switch: Annotated[str, typer.Argument(help="on or off", metavar="on|off")],
    store: Annotated[
        str | None,
        typer.Option(help="A store's name; or its http:// address, to reach it directly. By default all stores."),
    ] = None,
    agent: AgentUrl = AGENT,
    json_path: JsonPath = None,
) -> None:
    """Make stores answer miss, so that engines recompute, until switched off again."""
    if switch not in ("on", "off"):
        fail(f"write on or off, not {switch!r}", 2)
    body: dict[str, Any] = {"on": switch == "on"}
    if store and "://" in store:
        from tiertune_agent.client import call

        document = call("POST", server("--store", "store", store), "/v1/bypass", body, what="store")
        say(f"{store}: bypass is {'on' if document['bypass'] else 'off'}", document, json_path)
        return
    document = _agent("POST", agent, "/api/v1/bypass", body | {"store": store})
    _say_stores(document["stores"], f"bypass is {switch}")
    result(document, json_path)
    if not document["stores"]:
        fail(NO_STORE, 1)
    if set(document["stores"].values()) - {"ok"}:
        fail("not all stores answered; the agent tells them again every window until they do", 1)


@control_app.command()
def flush(
    namespace: Annotated[str | None, typer.Option(help="Only this namespace (digest).")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant (digest).")] = None,
    epoch: Annotated[int | None, typer.Option(min=0, help="Only what engines of this epoch stored.")] = None,
    engines: Annotated[
        bool, typer.Option("--engines", help="First empty the caches of the engines in the agent's settings.")
    ] = False,
    agent: AgentUrl = AGENT,
    json_path: JsonPath = None,
) -> None:
    """Drop chunks in all stores, each of which acknowledges it; on request also what engines cache themselves."""
    body = {"namespace": namespace, "tenant": tenant, "epoch": epoch, "engines": engines}
    document = _agent("POST", agent, "/api/v1/flush", body, timeout_s=FLUSH_TIMEOUT_S)
    reset, stores = document.get("engines", {}), document["stores"]
    told = {url: ack["reason"] for url, ack in reset.items()}
    told |= {name: _dropped(ack) for name, ack in stores.items()}
    _say_stores(told, "its caches are empty")
    result(document, json_path)
    # An acknowledgement with a remark: the store knows no such epoch.
    unknown = bool(stores) and all(ack["ok"] and ack["reason"] != "ok" for ack in stores.values())
    if unknown and all(ack["ok"] for ack in reset.values()):
        fail(f"no store knows epoch {epoch}: nothing was dropped in stores", 1)
    if not document["complete"]:
        fail("not all stores and engines acknowledged" if reset else "not all stores acknowledged", 1)
    if not told:
        fail(NO_STORE, 1)


def _agent(method: str, url: str, path: str, body: object = None, timeout_s: float = TIMEOUT_S) -> Any:  # noqa: ANN401
    from tiertune_agent.client import call

    return call(method, server("--agent", "agent", url), path, body, timeout_s=timeout_s)


def _say_stores(told: dict[str, str], done: str) -> None:
    for store, outcome in sorted(told.items()):
        typer.echo(f"{store}: {done if outcome == 'ok' else outcome}")


def _dropped(acknowledged: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} in {tier}" for tier, count in acknowledged["dropped"].items())
    told = f"flushed {counts or 'nothing'}"
    return told if acknowledged["reason"] == "ok" else f"{told}; {acknowledged['reason']}"
