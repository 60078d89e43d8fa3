"""The command line: exit statuses, messages, --json; against an agent that runs in this test."""

import json
import re
import shlex
import subprocess
import sys
from io import BytesIO, TextIOWrapper

import httpx
import pytest

from agent.fakes import fetch
from e2e.servers import HTTP, app_served
from tiertune_agent import client
from tiertune_agent.cli import TRACE
from tiertune_agent.replay.traces import BUILTIN
from tiertune_connector import __version__
from tiertune_connector.httpd.guarded import REMARK


@pytest.fixture
def served(agent, monkeypatch):
    """The agent's API on a real port, which the commands find by the environment."""
    with app_served(agent.served) as url:
        monkeypatch.setenv("TIERTUNE_AGENT", url)
        yield url


@pytest.fixture
def network(monkeypatch):
    """Sets what answers the commands."""

    def set_to(answer):
        made = httpx.Client
        monkeypatch.setattr(
            client.httpx, "Client", lambda **kwargs: made(**{**kwargs, "transport": httpx.MockTransport(answer)})
        )

    return set_to


def test_it_tells_its_version(tiertune):
    """That of the package, as stores tell it."""
    assert tiertune("--version")[:2] == (0, f"tiertune {__version__}\n")


def test_a_locale_that_lacks_a_letter_ends_no_command(tiertune, monkeypatch):
    """It is escaped, as on standard error."""
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(BytesIO(), "ascii"))
    assert tiertune("doctor", "--agent", "http://127.0.0.1:9").returncode == 1
    sys.stdout.flush()
    assert b"\\u2192" in sys.stdout.buffer.getvalue()


def test_help_names_the_traces_that_come_along():
    """Whoever reads it can try: `TRACE` is said by hand, for --help reads no traces."""
    assert f"an included trace: {', '.join(BUILTIN)}." in TRACE


@pytest.mark.usefixtures("served")
class TestDecisions:
    @pytest.mark.parametrize("state", ["", "\x1b[31m", "\udcff", "kept&limit=0", "kept#", "no such"])
    def test_a_state_that_is_none_is_refused_as_one(self, tiertune, state):
        """Whatever is written: the agent names the states that there are."""
        status, out, err = tiertune("decisions", "list", "--state", state)
        assert (status, out, err.startswith("state: Input should be 'proposed'")) == (2, "", True), err

    def test_they_are_listed_and_shown(self, proposed, tiertune):
        """A table for people, what is changed before why; the documents by --json."""
        done, document = tiertune.json("decisions", "list")
        assert (done.returncode, document["decisions"][0]["to"]) == (0, "off")
        assert "remote_fetch" in done.stdout
        done, document = tiertune.json("decisions", "show", 1)
        assert done.returncode == 0
        assert "fetching cost more than recomputing" in " ".join(done.stdout.split())
        first = ["id", "tuner", "store", "tier", "field", "from", "to", "mode", "state", "reason"]
        assert [line.split()[0] for line in done.stdout.splitlines()][: len(first)] == first
        assert len(document["evidence"]["windows"]) >= 2

    def test_what_others_wrote_commands_no_terminal(self, served, proposed, tiertune):
        """A reason may come from anybody who could freeze; its letters are told, and nothing else of it."""
        said = {"reason": "release\x1b]52;c;cm0gLXJm\x07\x9b2J\rtonight"}
        assert HTTP.post(f"{served}/api/v1/freeze", json=said).is_success
        code, _, err = tiertune("decisions", "approve", 1)
        assert (code, [letter for letter in err if not letter.isprintable()]) == (1, ["\n"])
        assert "release" in err

    def test_a_rejection_leaves_the_store_alone(self, proposed, tiertune, store):
        """Rejected: exit 0, nothing changed."""
        assert tiertune("decisions", "reject", 1)[0] == 0
        assert fetch(store) == "on"

    def test_a_change_is_approved_and_rolled_back_once(self, proposed, tiertune, store):
        """Made, then undone: exit 0 and the store changed, or as before; either again: exit 1 and why."""
        assert tiertune("decisions", "approve", 1)[0] == 0
        assert fetch(store) == "off"
        code, _, err = tiertune("decisions", "approve", 1)
        assert (code, err) == (1, "decision 1 is applied, not proposed\n")
        assert tiertune("decisions", "rollback", 1)[:2] == (0, "decision 1 is rolled back\n")
        assert fetch(store) == "on"
        code, _, err = tiertune("decisions", "rollback", 1)
        assert (code, err) == (1, "decision 1 is rolled_back: there is nothing to roll back\n")

    def test_what_holds_a_change_up_is_told(self, proposed, tiertune, store, rounds):
        """An approval and a rollback that are under way: exit 0 and what the store says; the decision has it, too."""
        told = "the store answers 503: it restarts"

        def restarts(_request):
            return httpx.Response(503, json={"message": "it restarts"})

        store.put_tuning = restarts
        assert tiertune("decisions", "approve", 1)[:2] == (0, f"decision 1 is approved: {told}\n")
        assert told in tiertune("decisions", "show", 1)[1]
        del store.put_tuning
        rounds(1)
        store.put_tuning = restarts
        assert tiertune("decisions", "rollback", 1)[:2] == (0, f"decision 1 is being rolled back: {told}\n")

    def test_an_unknown_decision_is_wrong_input(self, tiertune):
        """A number that does not exist: exit 2 and which."""
        assert tiertune("decisions", "show", 99)[::2] == (2, "there is no decision 99\n")


class TestControl:
    def test_freeze_and_unfreeze(self, served, tiertune, agent):
        """Frozen for a time with a reason; lifted by command."""
        assert tiertune("freeze", "--for", "2h", "--reason", "release")[0] == 0
        assert "release" in agent.changes.frozen()
        assert tiertune("unfreeze")[1] == "lifted 1 freeze\n"
        assert agent.changes.frozen() == ""

    def test_the_audit_is_listed(self, served, tiertune):
        """Newest first, as many as asked for; what somebody wrote is shown as it is; empty is told."""
        assert "no commands" in tiertune("audit")[1]
        tiertune("freeze", "--reason", "[bold]release[/bold]")
        tiertune("unfreeze")
        done, document = tiertune.json("audit")
        assert done.returncode == 0
        assert re.search(r"local +127.0.0.1 +unfreeze(.|\n)*freeze\s+.*\[bold\]release\[/bold\]", done.stdout)
        assert [row["what"] for row in document["audit"]] == ["unfreeze", "freeze"]
        out = tiertune("audit", "--limit", 1)[1]
        assert ("unfreeze" in out, "release" in out) == (True, False)

    def test_what_was_refused_is_audited_as_refused(self, served, proposed, tiertune):
        """With its reason: else it would look as if it had been done."""
        for _ in range(2):
            tiertune("decisions", "approve", 1)
        tiertune("bypass", "on", "--store", "host-z")
        done, document = tiertune.json("audit")
        told = re.findall(r"(?:bypass|approve)(?:, refused)?", done.stdout)
        assert told == ["bypass, refused", "approve, refused", "approve"]
        assert [row["detail"].get("refused") for row in document["audit"]] == [
            "no store is called host-z; known are host-a",
            "decision 1 is applied, not proposed",
            None,
        ]

    @pytest.mark.parametrize(
        ("how_long", "said"),
        [
            ("2moons", "write it as 30s, 10m or 6h"),
            ("", "write it as 30s, 10m or 6h"),
            ("0s", "for: a freeze lasts from 1s to 366d; leave this out to freeze until it is lifted"),
            ("0.000001ms", "for: a freeze lasts from 1s to 366d"),
            ("900d", "for: a freeze lasts from 1s to 366d"),
        ],
    )
    def test_a_freeze_for_nonsense_is_wrong_input(self, served, tiertune, agent, how_long, said):
        """The message says how to write a duration, and which there are; nothing is frozen, least of all for ever."""
        code, out, err = tiertune("freeze", "--for", how_long, "--reason", "x")
        assert (code, out, said in err) == (2, "", True), err
        assert agent.changes.frozen() == ""

    @pytest.mark.parametrize(
        "words", ["freeze --reason Gr\udcf6sse", "bypass on --store \udcff", "flush --tenant \udcff"]
    )
    def test_a_text_in_another_encoding_is_wrong_input(self, served, tiertune, seen, agent, words):
        """As a terminal in Latin-1 writes it: it cannot be sent, and that is not the agent's failure."""
        status, _, err = tiertune(*words.split())
        assert (status, "what is to be sent is no text in UTF-8: '\\udcf" in err) == (2, True), err
        assert (seen().fleet["frozen"], agent.history.journal.audited()) == (None, [])

    def test_a_freeze_says_why(self, served, tiertune, agent):
        """No reason is none: the message says what it is for."""
        assert tiertune("freeze", "--reason", " ")[::2] == (2, "reason: say why: it is shown to everyone who asks\n")
        assert agent.changes.frozen() == ""

    def test_bypass_by_the_agent(self, served, tiertune, store, rounds):
        """Every store is told; one that is away makes the exit status 1."""
        rounds(1)
        assert tiertune("bypass", "on")[:2] == (0, "host-a: bypass is on\n")
        assert store.bypass is True
        store.up = False
        code, _, err = tiertune("bypass", "off")
        assert code == 1
        assert "the agent tells them again" in err

    @pytest.mark.parametrize("words", [("bypass", "on"), ("flush",)])
    def test_an_agent_without_a_store_has_done_nothing(self, words, tiertune, monkeypatch):
        """As one that only observes: nobody is bypassed, and the exit says so."""
        monkeypatch.setattr("tiertune_agent.client.call", lambda *_, **__: {"stores": {}, "complete": True})
        code, out, err = tiertune(*words)
        assert (code, out) == (1, "")
        assert "the agent knows no store: nothing was done" in err

    @pytest.mark.parametrize(
        ("code", "answer"),
        [
            *((404, answer) for answer in ({"error": "no index"}, [], {"detail": None}, {"detail": ["no index"]})),
            (200, []),
            (200, {}),
            (422, {"message": [{"text": "no index"}]}),
        ],
    )
    def test_another_program_is_no_agent(self, tiertune, network, code, answer):
        """What it says is not told as an agent's refusal, nor read as an answer: the address is wrong."""
        network(lambda _: httpx.Response(code, json=answer))
        said = "what answers at http://host:9200 is no agent: mend the address\n"
        assert tiertune("decisions", "list", "--agent", "http://host:9200")[::2] == (2, said)

    @pytest.mark.parametrize(
        ("words", "what"), [("decisions reject 1 --agent", "agent"), ("bypass on --store", "store")]
    )
    def test_nothing_is_told_as_done_that_nobody_did(self, tiertune, network, words, what):
        """Another program may answer whatever is asked."""
        network(lambda _: httpx.Response(200, json={"ok": True}))
        said = f"what answers at http://host:9200 is no {what}: mend the address\n"
        assert tiertune(*words.split(), "http://host:9200")[:3] == (2, "", said)

    @pytest.mark.parametrize("answer", [{}, [], {"error": "no upstream"}, {"detail": None}])
    def test_a_proxy_that_reaches_nobody_is_no_wrong_address(self, tiertune, network, answer):
        """Whatever it answers: no agent does."""
        network(lambda _: httpx.Response(502, json=answer))
        status, _, err = tiertune("decisions", "list", "--agent", "http://agent:7420")
        told = "it answers 502 Bad Gateway; start it, or name its address by --agent\n"
        assert (status, err) == (1, f"no agent answers at http://agent:7420: {told}")

    @pytest.mark.parametrize(
        ("url", "said", "mend"),
        [
            ("https://a", "[SSL: WRONG_VERSION_NUMBER] wrong version number", "it speaks no TLS: write http:// in --"),
            ("https://a", "[SSL] record layer failure (_ssl.c:1032)", "it speaks no TLS: write http:// in --agent"),
            ("http://a", "Server disconnected without sending a response.", "if it speaks TLS, write https:// in --"),
            ("https://a", "Server disconnected without sending a response.", "see its log"),
            ("https://a", "certificate verify failed: Missing Authority Key Identifier", "mend its certificate"),
            ("https://self-signed", "[Errno 111] Connection refused", "start it, or name its address by --agent"),
        ],
    )
    def test_what_to_mend_goes_by_what_was_said(self, tiertune, network, url, said, mend):
        """By OpenSSL 3.0 or newer, by Python 3.13 or older; not by what the address happens to be."""
        said = said.replace("certificate verify", "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify")

        def fail(_request):
            raise httpx.ConnectError(said)

        network(fail)
        status, _, err = tiertune("decisions", "list", "--agent", url)
        assert (status, err.startswith(f"no agent answers at {url}: {said}; {mend}")) == (1, True), err

    def test_an_agent_that_hangs_need_not_be_started(self, tiertune, network):
        """It has the command: whoever froze is not told that it was for nothing."""

        def hang(_request):
            raise httpx.ReadTimeout("timed out")

        network(hang)
        status, _, err = tiertune("freeze", "--reason", "x", "--agent", "http://agent:7420")
        told = "timed out; it is there, see its log; what was asked may still be done\n"
        assert (status, err) == (1, f"no agent answers at http://agent:7420: {told}")

    def test_bypass_straight_to_a_store(self, tiertune, monkeypatch):
        """An address goes to the store itself, though no agent runs."""
        calls = []

        def answer(request):
            calls.append((str(request.url), json.loads(request.content)))
            return httpx.Response(200, json={"bypass": True})

        made = httpx.Client
        monkeypatch.setattr(
            client.httpx, "Client", lambda **kwargs: made(**{**kwargs, "transport": httpx.MockTransport(answer)})
        )
        assert tiertune("bypass", "on", "--store", "http://host-a:7410", "--agent", "none")[0] == 0
        assert calls == [("http://host-a:7410/v1/bypass", {"on": True})]

    @pytest.mark.parametrize(
        ("command", "said"),
        [
            ("bypass maybe", "write on or off, not 'maybe'"),
            ("bypass on --store host-z", "no store is called host-z; known are host-a"),
            ("bypass on --store gopher://x", "--store: write the store's address as http://host:port"),
            ("bypass on --store http://", "--store: write the store's address as http://host:port"),
            ("unfreeze --agent http://", "--agent: write the agent's address as http://host:port"),
            ("doctor --agent ''", "--agent: write the agent's address as http://host:port"),
            ("doctor --storage ''", "--storage: "),
            ("flush --agent ''", "--agent: write the agent's address as http://host:port"),
            ("flush --namespace abc", "namespace: write the whole digest, 32 characters of 0-9 and a-f"),
            ("flush --tenant ''", "tenant: write the whole digest, 32 characters of 0-9 and a-f"),
            ("flush --epoch -1", "--epoch"),
            ("unfreeze --agent http://127.0.0.1:9", "Connection refused; start it, or name its address by --agent"),
            ("freeze", "Missing option"),
            ("audit --limit 0", "--limit"),
            ("decisions list --state gone", "state: Input should be 'proposed', 'approved'"),
        ],
    )
    @pytest.mark.usefixtures("served")
    def test_wrong_commands_say_what_to_mend(self, tiertune, agent, command, said):
        """Wrong input is exit 2, a failure exit 1; always one message."""
        agent.tick()
        status, _, err = tiertune(*shlex.split(command))
        assert status == (1 if "refused" in said else 2)
        assert said in err
        assert "Traceback" not in err

    def test_flush_is_acknowledged_one_by_one(self, served, tiertune, store, rounds):
        """What each store dropped is told; exit 1 unless all answered."""
        rounds(1)
        assert tiertune("flush")[:2] == (0, "host-a: flushed 7 in dram, 3 in remote\n")
        store.up = False
        assert tiertune("flush")[0] == 1

    def test_flush_says_that_an_epoch_is_not_known(self, served, tiertune, store, rounds):
        """What the store remarks is told; where no store knows it, exit 1 and no word of a store that kept silent."""
        rounds(1)
        remark = "no namespace of epoch 7 is known here"
        store.answers("post_flush", 200, json={"dram": 0}, headers={REMARK: remark})
        status, out, err = tiertune("flush", "--epoch", 7)
        assert (status, out) == (1, f"host-a: flushed 0 in dram; {remark}\n")
        assert err == "no store knows epoch 7: nothing was dropped in stores\n"


class TestFiles:
    @pytest.mark.parametrize("command", [("policy", "check"), ("plan", "--fleet")])
    def test_what_a_file_says_commands_no_terminal(self, tiertune, tmp_path, command):
        """A key that is unknown is told, but for what a terminal would obey; so is the name of the file."""
        path = tmp_path / "f\x1b[31m.yaml"
        path.write_text('"\\e]52;c;x\\a": 1\n')
        code, _, err = tiertune(*command, path)
        assert (code, {letter for letter in err if not letter.isprintable()}) == (2, {"\n"})
        assert "]52;c;x" in err

    def test_db_upgrade_of_none_makes_none(self, tiertune, tmp_path, monkeypatch):
        """Where no settings lie, none is made and called upgraded."""
        monkeypatch.chdir(tmp_path)
        status, _, err = tiertune("db", "upgrade")
        assert (status, "agent.yaml: cannot be read: No such file" in err) == (2, True)
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "agent.yaml").write_text("stores: [{url: 'http://127.0.0.1:9'}]\n")
        assert tiertune("db", "upgrade")[0] == 0
        assert "already at revision" in tiertune("db", "upgrade")[1]

    @pytest.mark.parametrize(
        ("database", "said"),
        [
            ("sqlite:///{}/text", "cannot be opened: file is not a database"),
            ("mysql://a/b", "write sqlite:///path, or postgresql://"),
            ("nothing", "write sqlite:///path, or postgresql://"),
        ],
    )
    def test_db_upgrade_refuses_what_is_no_database(self, upgrade, tmp_path, database, said):
        """A file that is no database, and an address that names none, are wrong input."""
        (tmp_path / "text").write_bytes(b"not a database" * 100)
        status, _, err = upgrade(database.format(tmp_path))
        assert status == 2
        assert said in err

    @pytest.mark.parametrize("command", [("agent", "run"), ("store", "serve")])
    def test_a_bad_configuration_ends_before_it_begins(self, tiertune, tmp_path, command):
        """Exit 2 with the place of every problem."""
        (tmp_path / "c.yaml").write_text("htpt: {}\n")
        code, _, err = tiertune(*command, "--config", tmp_path / "c.yaml")
        assert code == 2
        assert f"{tmp_path}/c.yaml:1:1: htpt: unknown key" in err


def test_help_imports_nothing_heavy():
    """--help is quick because it loads neither servers nor SQL nor numbers."""
    heavy = {"sqlalchemy", "alembic", "fastapi", "uvicorn", "numpy", "pyarrow", "httpx"}
    code = (
        "import sys\nfrom tiertune_agent.cli import app\n"
        "for command in ([], ['curve'], ['agent']):\n"
        "    try:\n        app([*command, '--help'])\n    except SystemExit:\n        pass\n"
        f"print(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.count("Usage: ") == 3
    assert ended.stderr.strip() == "[]"
