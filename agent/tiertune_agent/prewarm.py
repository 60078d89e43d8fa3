"""``tiertune prewarm``: engines compute documents, and their chunks go to the stores, before anybody asks for them."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import typer
from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from tiertune_agent.credentials import from_environment
from tiertune_agent.engines import addresses, shown
from tiertune_agent.fields import JsonDict, read
from tiertune_agent.network import CallError, asked_whole, calling, json_of
from tiertune_agent.terminal.options import printable
from tiertune_agent.terminal.progress import Step, bar
from tiertune_connector.documents import Document, DocumentError, read_text
from tiertune_connector.units import format_count

TIMEOUT_S = 600.0
"""A long document waits behind the engine's other requests."""


class Text(Document):
    prompt: str = Field(min_length=1)


class Tokens(Document):
    prompt: tuple[NonNegativeInt, ...] = Field(min_length=1, alias="token_ids")


_LINE: TypeAdapter[Text | Tokens] = TypeAdapter(Text | Tokens)


@dataclass(frozen=True)
class Warming:
    """One document."""

    where: str
    """File, and line where it has several."""
    prompt: str | tuple[int, ...]


@dataclass
class Warmed:
    """Results of the documents at one engine."""

    documents: int = 0
    prompt_tokens: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)


def documents(path: Path) -> list[Warming]:
    """A file's documents: in ``.jsonl`` one a line, ``{"prompt": text}`` or ``{"token_ids": [...]}``; else it is one.

    DocumentError names the lines that are no documents.
    """
    lines = path.suffix == ".jsonl"
    text = read_text(path, newline=None if lines else "")  # a document's own line ends are tokens
    if not text.strip():
        raise DocumentError([f"{path}:1:1: the file is empty"])
    if not lines:
        return [Warming(str(path), text)]
    found, problems = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found.append(Warming(f"{path}:{number}", _LINE.validate_json(line, strict=True).prompt))
            except ValidationError:
                problems.append(f'{path}:{number}:1: write {{"prompt": "text"}} or {{"token_ids": [1, 2, 3]}}')
    if problems:
        raise DocumentError(problems)
    return found


def _asked(http: httpx.Client, method: str, url: str, path: str, **more: Any) -> JsonDict:  # noqa: ANN401 (JSON)
    with calling("engine", url):
        answer = asked_whole(http, method, url + path, **more)
        document = printable(json_of(answer))
    if answer.is_success and isinstance(document, dict):
        return document
    told = read(document, "error.message") or read(document, "message") or read(document, "error")
    raise CallError(f"{url} answers {answer.status_code}: {told or 'no reason told'}")


def first_model(http: httpx.Client, url: str) -> str:
    """The first model that an engine names. CallError if it does not answer, or names none."""
    told = _asked(http, "GET", url, "/v1/models")
    with suppress(LookupError, TypeError):
        if name := told["data"][0]["id"]:
            return str(name)
    raise CallError(f"{url} names no model: name one by --model")


def _send(http: httpx.Client, url: str, body: JsonDict) -> int:
    """Warm a document; returns the tokens that the engine counted. CallError says why it failed."""
    tokens = read(_asked(http, "POST", url, "/v1/completions", json=body), "usage.prompt_tokens")
    if not isinstance(tokens, int):
        raise CallError(f"what answers at {url} is no engine")
    return tokens


def warm(
    http: httpx.Client, asking: Mapping[str, JsonDict], wanted: Sequence[Warming], concurrency: int, step: Step
) -> dict[str, Warmed]:
    """Send each document to each engine, ``concurrency`` at once to each; ``step`` after each. A failure stops none.

    ``asking``: by engine, what is asked beside the prompt.
    """
    made = {url: Warmed() for url in asking}
    jobs: dict[Future[int], tuple[Warmed, Warming]] = {}
    with ExitStack() as stack:
        for url, body in asking.items():
            pool = ThreadPoolExecutor(concurrency)
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            jobs |= {pool.submit(_send, http, url, body | {"prompt": one.prompt}): (made[url], one) for one in wanted}
        for job in as_completed(jobs):
            warmed, one = jobs[job]
            try:
                warmed.prompt_tokens += job.result()
                warmed.documents += 1
            except CallError as error:
                warmed.failures.append({"document": one.where, "reason": str(error)})
            step()
    return made


def prewarm_command(
    files: Sequence[Path], engines: Sequence[str], *, model: str, salt: str, concurrency: int
) -> JsonDict:
    """Warm with a progress bar; returns ``--json``'s document. InputError, DocumentError, CallError say what to mend.

    An engine that names no model ends it before anything is sent.
    """
    wanted = [one for path in files for one in documents(path)]
    urls, access = dict.fromkeys(addresses(engines)), from_environment(os.environ, token=False)
    with access.client(timeout=TIMEOUT_S, headers=shown(), limits=httpx.Limits()) as http:
        try:
            body = {"max_tokens": 1, "temperature": 0} | ({"cache_salt": salt} if salt else {})
            asking = {url: body | {"model": model or first_model(http, url)} for url in urls}
            with bar("warming", len(wanted) * len(asking)) as progress:
                made = warm(http, asking, wanted, concurrency, progress.step)
        except (KeyboardInterrupt, SystemExit) as end:  # of SIGINT, or SIGTERM
            os._exit(getattr(end, "code", 130))  # Python would wait for the requests under way, for ten minutes
    for url, one in made.items():
        some = f"; {len(one.failures)} failed" if one.failures else ""
        typer.echo(f"{url}: {format_count(one.documents, 'document')}, {one.prompt_tokens:,} tokens{some}")
        for failure in one.failures:
            typer.echo(f"  {failure['document']}: {failure['reason']}")
    failed = sum(len(one.failures) for one in made.values())
    return {"documents": len(wanted), "failed": failed, "engines": {url: asdict(one) for url, one in made.items()}}
