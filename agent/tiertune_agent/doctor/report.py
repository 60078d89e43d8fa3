"""Reports the findings to people and as a document."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from tiertune_agent.doctor.checks import NAMES, ORDER
from tiertune_agent.doctor.facts import AllFacts, StorageFacts
from tiertune_agent.doctor.finding import Finding
from tiertune_agent.fields import JsonDict
from tiertune_agent.terminal.options import printable
from tiertune_agent.terminal.tables import pairs, terminal
from tiertune_connector.units import format_count

STYLES = {"error": "bold red", "warning": "yellow"}
STORAGE = {
    "storage": "{storage}",
    "latency": "{latency_ms:.2f} ms",
    "bandwidth": "{read:,.0f} MB/s read, {written:,.0f} MB/s written",
    "{prompt_tokens:,} tokens": "{fetch_ms:.1f} ms to fetch, {recompute_ms:.1f} to recompute",
    "recomputing": "{model} on {gpu}: an assumption",
    "break-even": "prefixes of {break_even_tokens:,.0f} tokens",
}
"""What is told of a storage that was measured."""


def document(facts: AllFacts, findings: Sequence[Finding]) -> JsonDict:
    """As ``--json`` writes it."""
    return {
        "healthy": not findings,
        "version": facts.version,
        "findings": [asdict(finding) for finding in findings],
        "storage": asdict(facts.storage) if facts.storage else None,
        "looked_at": looked_at(facts),
        "not_checked": list(facts.unknown),
    }


def looked_at(facts: AllFacts) -> dict[str, int]:
    """By kind, how many answered."""
    asked = {
        "agents": [facts.agent],
        "stores": facts.stores,
        "engines": facts.engines,
        "servers": facts.servers,
        "storages": [facts.storage],
    }
    return {kind: sum(one is not None and one.answers for one in those) for kind, those in asked.items()}


def show(facts: AllFacts, findings: Sequence[Finding]) -> None:
    console = terminal()
    if facts.storage and not facts.storage.problem:
        console.print(_storage(facts.storage))
    if findings:
        console.print(_table(findings))
    counts = Counter(finding.severity for finding in findings)
    told = ", ".join(format_count(counts[one], one) for one in ORDER if counts[one])
    places = ", ".join(format_count(count, name[:-1]) for name, count in looked_at(facts).items() if count)
    console.print(
        f"\n{told or 'nothing is wrong'}; {len(NAMES)} checks over {places or 'nothing that answers'}", highlight=False
    )
    for why in facts.unknown:
        console.print(f"not checked: {printable(why)}", style="dim", highlight=False, markup=False)


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 1, 0))
    table.add_column("", no_wrap=True)
    table.add_column("where", overflow="fold", max_width=32)
    table.add_column("what is wrong, and its mend", overflow="fold")
    for finding in findings:
        where, wrong, mend = map(printable, (finding.where, finding.wrong, finding.mend))
        text = Text(f"{wrong}\n").append(f"→ {mend}", style="green")
        table.add_row(Text(finding.severity, style=STYLES[finding.severity]), Text(where), text)
    return table


def _storage(one: StorageFacts) -> Table:
    told = vars(one) | {f"{what}_ms": 1e3 * getattr(one, f"{what}_s") for what in ("latency", "fetch", "recompute")}
    told |= {"read": one.bytes_per_s / 1e6, "written": one.write_bytes_per_s / 1e6}
    return pairs((name.format(**told), Text(text.format(**told))) for name, text in STORAGE.items())
