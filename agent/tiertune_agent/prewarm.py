"""``tiertune prewarm``: engines compute documents, and their chunks go to the stores, before anybody asks for them."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from tiertune_agent.credentials import from_environment
from tiertune_agent.engines import addresses, shown
from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.network import CallError, asked_whole, calling, json_of
from tiertune_agent.terminal.options import InputError, printable
from tiertune_agent.terminal.progress import Step, bar
from tiertune_connector.documents import DocumentError, read_text
from tiertune_connector.units import format_count

TIMEOUT_S = 600.0
"""A long document waits behind the engine's other requests."""
Prompt = str | list[int]


@dataclass(frozen=True)
class Warming:
    """One document."""

    where: str
    """File, and line where it has several."""
    prompt: Prompt


@dataclass
class Warmed:
    """Results of the documents at one engine."""

    documents: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Of these the engine already had; None: it does not report that (--enable-prompt-tokens-details)."""
    failures: list[dict[str, str]] = field(default_factory=list)

    def add(self, usage: Json) -> None:
        self.documents += 1
        self.prompt_tokens += _count(usage, "prompt_tokens") or 0
        cached = _count(usage.get("prompt_tokens_details"), "cached_tokens")
        if cached is not None:
            self.cached_tokens = (self.cached_tokens or 0) + cached


def _count(usage: Any, name: str) -> int | None:  # noqa: ANN401 (JSON)
    """A count of the usage; None if it has none."""
    told = usage.get(name) if isinstance(usage, dict) else None
    return told if type(told) is int else None


def documents(path: Path) -> list[Warming]:
    """A file's documents: in ``.jsonl`` one a line, ``{"prompt": text}`` or ``{"token_ids": [...]}``; else it is one.

    DocumentError names the lines that are no documents.
    """
    text = read_text(path)
    if path.suffix != ".jsonl":
        if not text.strip():
            raise DocumentError([f"{path}:1:1: the file is empty"])
        return [Warming(str(path), text)]
    found, problems = [], []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found.append(Warming(f"{path}:{number}", _prompt(line)))
            except ValueError as error:
                problems.append(f"{path}:{number}:1: {error}")
    if problems or not found:
        raise DocumentError(problems or [f"{path}:1:1: the file is empty"])
    return found


def _prompt(line: str) -> Prompt:
    """ValueError says what a line should be."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    keys = set(document) if isinstance(document, dict) else set()
    if keys == {"prompt"} and isinstance(document["prompt"], str) and document["prompt"]:
        return str(document["prompt"])
    ids = document["token_ids"] if keys == {"token_ids"} else None
    if isinstance(ids, list) and ids and all(type(one) is int and one >= 0 for one in ids):
        return list(ids)
    raise ValueError('write {"prompt": "text"} or {"token_ids": [1, 2, 3]}')


class Warmer:
    """Sends documents to one engine."""

    def __init__(self, url: str, *, model: str, salt: str) -> None:
        """``model`` empty: the first that the engine names. CallError if it does not answer, or names none.

        DocumentError if the environment names no usable authority.
        """
        self.url = url
        self._http = from_environment(os.environ, token=False).client(base_url=url, timeout=TIMEOUT_S, headers=shown())
        try:
            self._body = {"model": model or self._first_model(), "max_tokens": 1, "temperature": 0}
        except CallError:
            self._http.close()
            raise
        if salt:
            self._body["cache_salt"] = salt

    def send(self, prompt: Prompt) -> JsonDict:
        """Warm a document; returns the usage that the engine reports. CallError says why it failed."""
        told = self._asked("POST", "/v1/completions", json={**self._body, "prompt": prompt})
        usage = told.get("usage")
        return usage if isinstance(usage, dict) else {}

    def close(self) -> None:
        self._http.close()

    def _first_model(self) -> str:
        models = self._asked("GET", "/v1/models").get("data")
        first = models[0] if isinstance(models, list) and models else None
        name = first.get("id") if isinstance(first, dict) else None
        if not name:
            raise CallError(f"{self.url} names no model: name one by --model")
        return str(name)

    def _asked(self, method: str, path: str, **more: Any) -> JsonDict:  # noqa: ANN401 (JSON)
        with calling("engine", self.url):
            answer = asked_whole(self._http, method, path, **more)
            document = printable(json_of(answer))
        if not answer.is_success or not isinstance(document, dict):
            raise CallError(_reason(answer.status_code, document))
        return document


def _reason(code: int, document: Any) -> str:  # noqa: ANN401 (JSON)
    error = document.get("error", document) if isinstance(document, dict) else {}
    told = error.get("message") if isinstance(error, dict) else error
    return f"{code}: {told or 'no reason told'}"


def warm(warmers: Iterable[Warmer], wanted: Sequence[Warming], concurrency: int, step: Step) -> dict[str, Warmed]:
    """Send each document to each engine, ``concurrency`` at once to each; ``step`` after each. A failure stops none."""
    warmers = list(warmers)
    made = {warmer.url: Warmed() for warmer in warmers}
    with ExitStack() as stack:
        jobs: dict[Future[JsonDict], tuple[Warmer, Warming]] = {}
        for warmer in warmers:
            pool = ThreadPoolExecutor(max_workers=concurrency)
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            jobs |= {pool.submit(warmer.send, one.prompt): (warmer, one) for one in wanted}
        for job in as_completed(jobs):
            warmer, one = jobs[job]
            try:
                made[warmer.url].add(job.result())
            except CallError as error:
                made[warmer.url].failures.append({"document": one.where, "reason": str(error)})
            step()
    return made


def prewarm_command(
    files: Sequence[Path], engines: Sequence[str], *, model: str, salt: str, concurrency: int
) -> JsonDict:
    """Warm with a progress bar; returns ``--json``'s document. InputError, DocumentError, CallError say what to mend.

    An engine that cannot be asked stops no other one.
    """
    wanted = [one for path in files for one in documents(path)]
    urls = dict.fromkeys(addresses(engines))
    if not urls:
        raise InputError("name at least one engine: --engine http://host:port")
    warmers: list[Warmer] = []
    cold: dict[str, CallError] = {}
    try:
        for url in urls:
            try:
                warmers.append(Warmer(url, model=model, salt=salt))
            except CallError as error:
                cold[url] = error
        if not warmers:
            raise cold[next(iter(urls))]
        with bar("warming", len(wanted) * len(warmers)) as progress:
            made = warm(warmers, wanted, concurrency, progress.step)
    except (KeyboardInterrupt, SystemExit) as end:  # of SIGINT, or SIGTERM
        os._exit(getattr(end, "code", 130))  # Python would wait for the requests under way, for ten minutes
    finally:
        for warmer in warmers:
            warmer.close()
    for url, why in cold.items():
        made[url] = Warmed(failures=[{"document": one.where, "reason": str(why)} for one in wanted])
    for sentence in _sentences(made):
        typer.echo(sentence)
    failed = sum(len(one.failures) for one in made.values())
    told = {url: {**vars(one)} for url, one in made.items()}
    return {"documents": len(wanted), "failed": failed, "engines": told}


def _sentences(made: Mapping[str, Warmed]) -> Iterator[str]:
    for url, one in made.items():
        cached = "" if one.cached_tokens is None else f", {one.cached_tokens:,} of which it had"
        failed = f"; {len(one.failures)} failed" if one.failures else ""
        yield f"{url}: {format_count(one.documents, 'document')}, {one.prompt_tokens:,} tokens{cached}{failed}"
        yield from (f"  {failure['document']}: {failure['reason']}" for failure in one.failures)
