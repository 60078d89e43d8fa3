"""Who may call the agent: tokens by role, browsers that sign in, audit rows with names, HTTPS to stores that ask."""

import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from shutil import copy

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from connector.stores import at_once, running
from e2e.redis_servers import Certificates, certificates, expire
from e2e.servers import app_served
from tiertune_agent import client as command
from tiertune_agent.changes.operators import Caller
from tiertune_agent.credentials import CA_FILE, TOKEN_FILE, Bearer, access, from_environment
from tiertune_agent.doctor.command import Endpoints, examine
from tiertune_agent.network import http_client
from tiertune_agent.run import utc_now
from tiertune_agent.settings import HttpSettings
from tiertune_agent.terminal.options import InputError
from tiertune_agent.web import signing
from tiertune_agent.web.api import MOST_BYTES
from tiertune_agent.web.signing import COOKIE, LAST_S, Sessions
from tiertune_connector.documents import DocumentError
from tiertune_connector.httpd.listening import Listening
from tiertune_connector.httpd.serving import certificate
from tiertune_connector.httpd.tokens import ROLES, TokenFile
from tiertune_connector.serve.main import StoreProcess

pytestmark = pytest.mark.slow

READ, APPROVE, TUNE = (f"{role}-{'x' * 30}" for role in ROLES)
AWAY = "agent.example:7420"


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"read eve {READ}\napprove anna {APPROVE}\ntune ops {TUNE}\n")
    return path


@pytest.fixture
def asking(agents, tokens):
    """An agent that other hosts reach: it asks for tokens."""
    made = agents(http=HttpSettings(host="0.0.0.0", port=0, tokens_file=tokens))
    made.loop.run_once()
    return made


@pytest.fixture
def browser(asking):
    with TestClient(asking.served, f"http://{AWAY}", client=("10.0.0.7", 5000), follow_redirects=False) as http:
        yield http


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def sign_in(browser, token, **headers):
    return browser.post("/login", content=f"token={token}", headers=headers)


def test_from_elsewhere_every_document_asks_for_a_token(browser):
    """Health alone is free; a token that reads opens the rest, by whatever name the agent is called."""
    paths = ("/api/v1/fleet", "/api/v1/openapi.json", "/metrics", "/live")
    assert browser.get("/healthz").status_code == 200
    assert [browser.get(path).status_code for path in paths] == [401] * 4
    assert [browser.get(path, headers=bearer(READ)).status_code for path in paths] == [200] * 4


@pytest.mark.parametrize(
    ("path", "body", "role"),
    [
        ("/api/v1/freeze", {"reason": "release"}, APPROVE),
        ("/api/v1/unfreeze", None, APPROVE),
        ("/api/v1/decisions/1/approve", None, APPROVE),
        ("/api/v1/bypass", {"on": True}, TUNE),
        ("/api/v1/flush", {}, TUNE),
    ],
)
def test_a_command_needs_its_role(browser, path, body, role):
    """Freezing and change control are for those who approve; what stores serve is for those who tune."""
    lesser = READ if role == APPROVE else APPROVE
    assert browser.post(path, json=body, headers=bearer(lesser)).status_code == 403
    assert browser.post(path, json=body, headers=bearer(role)).status_code in (200, 404)


def test_an_audit_row_has_the_name_of_the_token(browser):
    """Who, what, and from where; a refused command leaves none."""
    browser.post("/api/v1/freeze", json={"reason": "mine"}, headers=bearer(READ))
    browser.post("/api/v1/freeze", json={"reason": "release"}, headers=bearer(APPROVE))
    (row,) = browser.get("/api/v1/audit", headers=bearer(READ)).json()["audit"]
    assert (row["who"], row["what"], row["from"]) == ("anna", "freeze", "10.0.0.7")


def test_a_browser_signs_in_and_out(browser):
    """The page leads to the form; a session reads and commands as its token does, until it is ended."""
    page = {"Accept": "text/html"}
    told = {path: browser.get(path, headers=page).headers["location"] for path in ("/", "/api/v1/fleet")}
    assert told == {"/": "login", "/api/v1/fleet": "../../login"}
    form = browser.get("/login")
    assert "form-action 'self'" in form.headers["content-security-policy"]
    assert sign_in(browser, "x" * 30).status_code == 401
    answer = sign_in(browser, APPROVE)
    assert (answer.status_code, answer.headers["location"]) == (303, "./")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert APPROVE not in cookie
    assert "Sign out" in browser.get("/", headers=page).text
    assert browser.post("/api/v1/freeze", json={"reason": "release"}).status_code == 200
    session = browser.cookies[COOKIE]
    assert browser.post("/logout").status_code == 303
    browser.cookies.set(COOKIE, session)
    assert browser.get("/api/v1/fleet").status_code == 401


def test_another_site_cannot_use_a_session(browser):
    """A call that a browser makes for a foreign page is refused, also one to the form."""
    sign_in(browser, TUNE)
    foreign = {"Origin": "https://evil.example"}
    assert browser.post("/api/v1/bypass", json={"on": True}, headers=foreign).status_code == 403
    assert sign_in(browser, TUNE, **foreign).status_code == 403
    own = {"Origin": f"http://{AWAY}"}
    assert browser.post("/api/v1/bypass", json={"on": False}, headers=own).status_code == 200


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_behind_a_proxy_with_https_the_session_goes_over_that_alone(browser, scheme):
    """Browsers name it where they sign in."""
    cookie = sign_in(browser, READ, Origin=f"{scheme}://{AWAY}").headers["set-cookie"].lower()
    assert ("; secure" in cookie) == (scheme == "https")


def test_guessing_at_the_form_is_slowed_down(browser):
    """Ten wrong tokens, and then no other wrong one for a while; who has a right one is not kept out by others."""
    assert [sign_in(browser, f"guess{n}").status_code for n in range(12)] == [401] * 10 + [429] * 2
    assert sign_in(browser, TUNE).status_code == 303


def test_guesses_at_once_are_no_more_than_guesses_one_by_one(tokens):
    """Else whoever guesses on many connections would not be slowed down."""
    app, codes = FastAPI(), []

    def clock():
        time.sleep(0.001)  # others go on meanwhile
        return 0.0

    held = Sessions(TokenFile(tokens), clock)
    app.include_router(signing.router(held, secure=False, clock=clock))
    with TestClient(app) as browser:
        at_once(lambda number: codes.append(sign_in(browser, f"guess{number}").status_code), 30)
    assert sorted(codes) == [401] * 10 + [429] * 20


def test_a_form_is_bounded_as_every_body_is(browser):
    """Nobody has to be known to send one."""
    assert sign_in(browser, "x" * MOST_BYTES).status_code == 413


def test_a_session_ends_with_its_time_and_with_its_token(tokens):
    """Twelve hours at most; at once where the token is taken away."""
    now = [0.0]
    sessions = Sessions(TokenFile(tokens), lambda: now[0])
    first, second = sessions.begin(READ), sessions.begin(TUNE)
    assert sessions.holder(second).name == "ops"
    tokens.write_text(f"read eve {READ}\n")
    assert (sessions.holder(first).name, sessions.holder(second)) == ("eve", None)
    now[0] = LAST_S
    assert sessions.holder(first) is None


def test_on_loopback_reading_stays_free(agents, tokens):
    """Where tokens are set, commands ask for one also there; a foreign page's name for this host is none of ours."""
    agent = agents(http=HttpSettings(port=0, tokens_file=tokens))
    with TestClient(agent.served, base_url="http://127.0.0.1", client=("127.0.0.1", 5000)) as http:
        assert http.get("/api/v1/fleet").status_code == 200
        assert http.get("/api/v1/fleet", headers={"Host": "rebound.example"}).status_code == 400
        assert http.post("/api/v1/unfreeze").status_code == 401
        assert http.post("/api/v1/unfreeze", headers=bearer(APPROVE)).status_code == 200


# -- what the agent and the command line show


@pytest.mark.parametrize("refusal", [401, 403])
def test_a_token_that_was_changed_in_place_is_read_again(tmp_path, refusal):
    """A refused call is made once more with what the file has now, also where only the old one's role was too low."""
    path, shown = tmp_path / "token", []

    def answer(request):
        shown.append(request.headers["authorization"].removeprefix("Bearer "))
        return httpx.Response(200 if shown[-1] == "new" else refusal)

    path.write_text("old\n")
    with httpx.Client(auth=Bearer(path), transport=httpx.MockTransport(answer), base_url="http://a") as http:
        assert http.get("/").status_code == refusal
        path.write_text("new\n")
        assert http.get("/").status_code == 200
        assert http.get("/").status_code == 200
    assert shown == ["old", "old", "new", "new"]


@pytest.mark.parametrize("text", [None, " \n", "é\n"])
def test_a_file_without_a_token_is_told(tmp_path, text):
    """A file that is missing, empty, or no token."""
    if text is not None:
        (tmp_path / "token").write_text(text)
    with pytest.raises(DocumentError, match="token"):
        access(tmp_path / "token", None)


def test_a_device_is_no_file_of_tokens_or_certificates():
    """A pipe nobody writes to would be read for ever, and so are both refused."""
    null = Path("/dev/null")
    served = Listening(host="127.0.0.1", port=0, certificate_file=null, key_file=null)
    for use in (lambda: access(null, None), lambda: access(None, null), lambda: certificate(served)):
        with pytest.raises(DocumentError, match="it is no regular file"):
            use()


@pytest.mark.parametrize("variable", [TOKEN_FILE, CA_FILE])
def test_a_file_of_the_environment_that_cannot_be_read_is_told_with_its_variable(variable, tmp_path):
    """No command and no settings file has that path: whoever mends it has to know where it stands."""
    with pytest.raises(DocumentError, match=rf"^{variable}: {tmp_path / 'none'}: .*No such file"):
        from_environment({variable: str(tmp_path / "none")})


@dataclass(frozen=True)
class Encrypted:
    """A real store that serves HTTPS to holders of a token, and to nobody else."""

    process: StoreProcess
    url: str
    files: Certificates


@pytest.fixture
def encrypted(tmp_path, tokens):
    files = certificates(tmp_path)
    pair = {"certificate_file": files.server, "key_file": files.server_key}
    with running(tmp_path, http={"host": "0.0.0.0", "port": 0, "tokens_file": tokens, **pair}) as process:
        yield Encrypted(process, process.address.replace("0.0.0.0", "localhost"), files)


@pytest.fixture
def token(tmp_path):
    """A file with one that tunes."""
    (tmp_path / "token").write_text(TUNE)
    return tmp_path / "token"


def test_a_command_shows_the_token_that_the_environment_names(monkeypatch, token, encrypted):
    """Straight to a store over HTTPS: refused without a token, or with a wrong one; messages name what to mend."""

    def call():
        return command.call("POST", encrypted.url, "/v1/bypass", {"on": True})

    monkeypatch.setenv(CA_FILE, str(encrypted.files.ca))
    with pytest.raises(InputError, match=TOKEN_FILE):
        call()
    monkeypatch.setenv(TOKEN_FILE, str(token))
    token.write_text("w" * 20)
    with pytest.raises(InputError, match=r"refuses the token in .*token$"):
        call()
    token.write_text(TUNE)
    assert call()["bypass"] is True
    monkeypatch.delenv(CA_FILE)
    with pytest.raises(command.CallError, match=rf"certificate.*{CA_FILE}"):
        call()


def test_an_authority_that_the_system_trusts_is_trusted_unless_another_is_named(monkeypatch, encrypted):
    """As by the Redis client, and by whatever else uses OpenSSL; there is no other way to name one for engines."""
    monkeypatch.setenv("SSL_CERT_FILE", str(encrypted.files.ca))
    with http_client(base_url=encrypted.url) as http:
        assert http.get("/healthz").status_code == 200
    named = access(None, encrypted.files.client)  # which signed nothing
    with named.client(base_url=encrypted.url) as http, pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        http.get("/healthz")


def test_who_is_plain_by_its_address_is_trusted_with_nothing_encrypted(monkeypatch, encrypted):
    """Such a client has read no authorities: it takes no certificate, rather than any."""
    monkeypatch.setenv("SSL_CERT_FILE", str(encrypted.files.ca))
    with http_client(base_url="http://localhost") as http, pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
        http.get(f"{encrypted.url}/healthz")


def test_a_certificate_of_another_name_is_not_told_as_one_of_an_unknown_authority(monkeypatch, encrypted):
    """As if the system trusted its authority: naming that would mend nothing."""
    monkeypatch.setenv("SSL_CERT_FILE", str(encrypted.files.ca))
    told = r"certificate is not valid for '127.0.0.1'.*; name it as its certificate does, by --store$"
    with pytest.raises(command.CallError, match=told):
        command.call("GET", encrypted.url.replace("localhost", "127.0.0.1"), "/v1/status", what="store")


def test_what_is_wrong_with_a_certificate_is_told_as_that(monkeypatch, encrypted):
    """Who answers need not be started: the certificate is to be renewed, or the address mended."""
    monkeypatch.setenv(CA_FILE, str(encrypted.files.ca))
    expire(encrypted.files)
    with pytest.raises(command.CallError, match=r"has expired.*; renew its certificate, or set this machine's clock$"):
        command.call("GET", encrypted.url, "/v1/status")


def test_what_speaks_tls_is_named_with_it(encrypted):
    """It ends a call that does not: the store is there."""
    with pytest.raises(command.CallError, match=r"; if it speaks TLS, write https:// in --store; else see its log$"):
        command.call("GET", encrypted.url.replace("https:", "http:"), "/healthz", what="store")


def test_what_speaks_no_tls_is_named_without(agent):
    """An address with one letter too many."""
    told = "; it speaks no TLS: write http:// in"
    with app_served(agent.served) as url, pytest.raises(command.CallError, match=told):
        command.call("GET", url.replace("http:", "https:"), "/healthz")


def test_a_certificate_that_is_exchanged_is_served_at_the_next_connection(encrypted, tmp_path):
    """Without a restart, which would cost the DRAM; while only one of both files is new, the former pair is served."""

    def served():
        return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("localhost", httpx.URL(encrypted.url).port)))

    (tmp_path / "new").mkdir()
    files, new = encrypted.files, certificates(tmp_path / "new")
    was = served()
    copy(new.server, files.server)
    assert served() == was
    copy(new.server_key, files.server_key)
    assert served() == ssl.PEM_cert_to_DER_cert(new.server.read_text()) != was
    files.server_key.unlink()
    assert served() != was


def test_an_agent_reads_and_tunes_stores_that_ask(agents, token, encrypted):
    """Over HTTPS with a token: counters, samples and commands; without one the store counts as unreachable."""
    stores = {"stores": [{"url": encrypted.url, "name": "host-a"}], "stores_ca_file": encrypted.files.ca}
    agent = agents(real=True, now=utc_now, stores_token_file=token, **stores)
    agent.loop.run_once()
    assert [record.name for record in agent.history.stores()] == ["host-a"]
    assert agent.operators.bypass(Caller("ops", ""), True, None)["stores"] == {"host-a": "ok"}
    assert encrypted.process.store.tuning.bypass
    (trouble,) = agents(real=True, now=utc_now, **stores).collector.collect()
    assert trouble.kind == "store_unreachable"


def test_commands_trust_engines_as_the_rest_but_show_them_no_token(monkeypatch, token, tiertune, encrypted):
    """What answers here, a store in place of an engine, is reached by its authority, and is shown no token."""
    monkeypatch.setenv(CA_FILE, str(encrypted.files.ca))
    monkeypatch.setenv(TOKEN_FILE, str(token))
    (found,) = examine(Endpoints(engines=[encrypted.url])).engines
    assert "401" in found.problem
    warmed = tiertune("prewarm", encrypted.files.ca, "--engine", encrypted.url)
    assert (warmed.returncode, "401" in warmed.stderr) == (1, True)


def test_an_agent_trusts_engines_as_stores_but_shows_them_no_token(agents, token, encrypted):
    """Whom it empties is reached by the stores' authority."""
    stores = {"stores": [{"url": encrypted.url}], "stores_ca_file": encrypted.files.ca, "stores_token_file": token}
    flushed = agents(real=True, engines=[encrypted.url], **stores).operators.flush(Caller("ops", ""), {}, engines=True)
    assert flushed["engines"] == {encrypted.url: {"ok": False, "reason": "answered 401"}}


def test_an_agent_trusts_sources_as_stores_but_shows_them_no_token(agents, token, encrypted):
    """Who signed stores' certificates may have signed a source's; the token is for stores alone."""
    source = {"name": "engine-a", "url": f"{encrypted.url}/metrics", "kind": "vllm"}
    agent = agents(real=True, now=utc_now, observe=[source], stores_token_file=token, stores_ca_file=encrypted.files.ca)
    (trouble,) = agent.observer.collect(())
    assert trouble.message.endswith("it answers 401 Unauthorized")
