"""Documents are computed before anybody asks for them, at an engine that answers as vLLM does."""

import json
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from agent.engine_server import fake_engine
from connector.stores import eventually
from tiertune_agent.prewarm import Warming, documents, warm
from tiertune_connector.documents import DocumentError


@pytest.fixture
def engine():
    with fake_engine() as one:
        yield one


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one two three"}\n\n{"token_ids": [1, 2, 3, 4]}\n')
    return path


@pytest.fixture
def prewarm(tiertune, tmp_path, engine, prompts):
    """At the engine, unless others are named: exit status, the document of --json, and what was said."""

    def run(file=prompts, *more, urls=None):
        path = tmp_path / "warm.json"
        engines = [word for url in urls or [engine.url] for word in ("--engine", url)]
        code, out, err = tiertune("prewarm", file, *engines, *more, "--json", path)
        return code, json.loads(path.read_text()) if path.exists() else None, out + err

    return run


def test_every_document_is_computed_once_at_every_engine(prewarm, engine):
    """A token each is asked for, of the engine's first model; prompt tokens are counted."""
    with fake_engine() as other:
        code, told, said = prewarm(urls=[engine.url, other.url])
        assert code == 0
        assert (told["documents"], told["failed"]) == (2, 0)
        for one in (engine, other):
            assert told["engines"][one.url]["prompt_tokens"] == 7
            assert sorted(json.dumps(body["prompt"]) for body in one.asked) == ['"one two three"', "[1, 2, 3, 4]"]
            assert all((body["model"], body["max_tokens"]) == ("llama", 1) for body in one.asked)
            assert all("cache_salt" not in body for body in one.asked)
        assert f"{engine.url}: 2 documents, 7 tokens\n" in said


def test_who_gives_up_waits_for_no_engine(engine, prompts):
    """Ctrl-C while an engine computes ends the command at once."""
    engine.gate.clear()
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # it may be ignored by now
    main = f"{listens}; from tiertune_agent.cli import main; main()"
    command = [sys.executable, "-c", main, "prewarm", str(prompts), "--engine", engine.url]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            eventually(lambda: engine.at_once == 2)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
            assert engine.at_once == 2
            assert process.stderr.read() == b""
        finally:
            engine.gate.set()
            process.kill()


def test_a_text_is_one_document(prewarm, tmp_path, engine):
    """Whatever is no .jsonl, with all its lines; salt and model as named."""
    (tmp_path / "manual.txt").write_text("chapter one\n\nchapter two\n")
    more, urls = ("--salt", "anna", "--model", "adapter"), [f"{engine.url}/"]
    code, _, said = prewarm(tmp_path / "manual.txt", *more, urls=urls)
    assert code == 0
    assert f"{engine.url}: 1 document, " in said
    assert [(body["prompt"], body["cache_salt"], body["model"]) for body in engine.asked] == [
        ("chapter one\n\nchapter two\n", "anna", "adapter")
    ]


def test_one_that_fails_stops_none_and_is_exit_1(prewarm, engine, prompts):
    """Its line and the engine's own reason are told."""
    engine.longest = 3
    code, told, said = prewarm()
    assert code == 1
    assert (told["failed"], told["engines"][engine.url]["documents"]) == (1, 1)
    assert f"{prompts}:3: {engine.url} answers 400: maximum context length is 3 tokens" in said


def test_what_an_engine_says_commands_no_terminal(prewarm, engine):
    """Its letters are told, and nothing else of them."""
    engine.complete = lambda _: (400, {"error": {"message": "too long\x1b]52;c;cm0gLXJm\x07\x9b2J\rby far"}})
    code, _, said = prewarm()
    assert (code, {letter for letter in said if not letter.isprintable()}) == (1, {"\n"})
    assert "too long" in said


@pytest.mark.parametrize("usage", [{"prompt_tokens": "many"}, {"prompt_tokens": [3]}, {}, 7, None])
def test_what_tells_no_numbers_is_no_engine(prewarm, engine, usage):
    """Its documents have failed, and another one's are counted as ever."""
    engine.complete = lambda _: (200, {"choices": [{"text": "a"}], "usage": usage})
    with fake_engine() as other:
        code, told, said = prewarm(urls=[engine.url, other.url])
    assert (code, told["failed"], told["engines"][other.url]["prompt_tokens"]) == (1, 2, 7)
    assert f"what answers at {engine.url} is no engine" in said


@pytest.mark.parametrize("data", [{"id": "llama"}, 3, ["llama"], [], [{"id": None}]])
def test_an_engine_that_names_no_model_is_told_of(prewarm, engine, data):
    """However it says so."""
    engine.models = {"data": data}
    assert f"{engine.url} names no model" in prewarm()[2]


def test_the_hundredth_line_is_told_as_a_number(prewarm, tmp_path, engine):
    """Not as the emoji that a terminal's library takes ``:100:`` for."""
    engine.longest = 3
    path = tmp_path / "many.jsonl"
    path.write_text(99 * "\n" + '{"token_ids": [1, 2, 3, 4]}\n')
    assert f"{path}:100: {engine.url} answers 400: " in prewarm(path)[2]


def test_no_more_are_under_way_than_allowed(prewarm, tmp_path, engine):
    """Eight documents, two at a time: the engine never has a third."""
    (tmp_path / "many.jsonl").write_text("".join(f'{{"token_ids": [{number}]}}\n' for number in range(8)))
    engine.gate.clear()

    def release():
        eventually(lambda: engine.at_once == 2)
        engine.gate.set()

    helper = threading.Thread(target=release)
    helper.start()
    code, told, _ = prewarm(tmp_path / "many.jsonl", "--concurrency", 2)
    helper.join()
    assert (code, told["engines"][engine.url]["documents"], engine.most_at_once) == (0, 8, 2)


def senders():
    return {thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")}


def test_what_ends_it_sends_nothing_more(engine):
    """What waits for its turn is taken back; else each would be sent, one after the other, to nobody's use."""
    wanted, before = [Warming(str(number), (number,)) for number in range(100)], senders()

    def stop():
        engine.gate.clear()
        raise RuntimeError("no bar")

    with httpx.Client() as http:
        with pytest.raises(RuntimeError):
            warm(http, {engine.url: {}}, wanted, 2, stop)
        sent = len(engine.asked)
        engine.gate.set()
        eventually(lambda: not senders() - before)
    assert len(engine.asked) <= sent + 2


def test_an_engine_with_a_key_is_shown_it(prewarm, engine, monkeypatch):
    """From the environment; without it the refusal is told."""
    engine.key = "s3cret-of-the-engine"
    code, _, said = prewarm()
    assert (code, f"{engine.url} answers 401: Unauthorized" in said) == (1, True)
    monkeypatch.setenv("TIERTUNE_ENGINE_KEY", engine.key)
    assert prewarm()[0] == 0


def test_a_failure_at_one_engine_keeps_no_other_cold(prewarm, engine):
    """Its documents have failed, the others' are warm, and the result tells both."""
    engine.longest = 0
    with fake_engine() as other:
        code, told, said = prewarm(urls=[engine.url, other.url])
    assert (code, told["failed"], told["engines"][other.url]["documents"]) == (1, 2, 2)
    assert f"{engine.url}: 0 documents, 0 tokens; 2 failed" in said


def test_where_one_is_not_there_nothing_is_sent(prewarm, engine):
    """Exit 1 with its address."""
    code, told, said = prewarm(urls=[engine.url, "http://127.0.0.1:9"])
    assert (code, told, engine.asked) == (1, None, [])
    assert "no engine answers at http://127.0.0.1:9" in said


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"prompt": "good"}\n{"prompt": 1}', '2:1: write {"prompt": "text"} or {"token_ids": [1, 2, 3]}'),
        ('{"token_ids": [1, true]}', "1:1: write"),
        ('{"token_ids": []}', "1:1: write"),
        ('{"prompt": "a", "model": "b"}', "1:1: write"),
        ("[1]", "1:1: write"),
        ("text", "1:1: write"),
        ("[" * 100_000, "1:1: write"),
        ("\n", "1:1: the file is empty"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path, text, problem):
    """With file, line and column, before anything is sent."""
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(DocumentError) as raised:
        documents(tmp_path / "d.jsonl")
    assert raised.value.problems[0].startswith(f"{tmp_path / 'd.jsonl'}:{problem}")


def test_a_text_may_hold_what_else_ends_a_line(tmp_path):
    """Only a line feed ends a line of JSON: others that Unicode knows stand in texts as they are."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\n', encoding="utf-8")
    assert [one.prompt for one in documents(tmp_path / "d.jsonl")] == ["a\u2028b\u0085c", "d"]


@pytest.mark.parametrize("text", ["one\r\ntwo\r\n", "one\rtwo\n", "one\ntwo"])
def test_a_text_keeps_its_line_ends(tmp_path, text):
    """Other line ends are other tokens: what was warmed would be no beginning of what is asked."""
    (tmp_path / "d.txt").write_bytes(text.encode())
    assert [one.prompt for one in documents(tmp_path / "d.txt")] == [text]


@pytest.mark.parametrize(("name", "text"), [("d.txt", "one"), ("d.jsonl", '{"prompt": "one"}')])
def test_a_mark_of_the_encoding_is_no_text(tmp_path, name, text):
    """Some editors begin a file with it; no prompt begins so."""
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert [one.prompt for one in documents(tmp_path / name)] == ["one"]


def test_wrong_usage_is_exit_2(prewarm, tmp_path, engine):
    """A file that is none; an address that is none; an empty text."""
    (tmp_path / "empty.txt").write_text(" \n")
    for wrong in (
        prewarm(tmp_path / "gone.txt"),
        prewarm(urls=["engine:8000"]),
        prewarm(tmp_path / "empty.txt"),
    ):
        assert wrong[0] == 2
    assert engine.asked == []
