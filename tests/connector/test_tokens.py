"""Tokens: who they belong to, what they allow, and how often one may try."""

import asyncio

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from connector.stores import NAMESPACE, Http, running
from tiertune_connector.documents import DocumentError
from tiertune_connector.httpd.guarded import ERRORS_AT_ONCE, ERRORS_PER_S, WRITES_AT_ONCE, Limit, behind_tokens
from tiertune_connector.httpd.tokens import ROLES, Holder, TokenFile, parse

READ, APPROVE, TUNE = (f"{role}-{'x' * 30}" for role in ROLES)
FILE = f"# role name token\nread prometheus {READ}\napprove anna {APPROVE}  # on call\n\ntune agent {TUNE}\n"
FLUSH = {"namespace": NAMESPACE.digest}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(FILE)
    return path


def test_a_token_has_one_holder(path):
    """Name and role are those of its line; what is no token is nobody's."""
    tokens = TokenFile(path)
    assert tokens.holder(APPROVE) == Holder("anna", "approve")
    assert [tokens.holder(text) for text in ("", "read", APPROVE[:-1], APPROVE + "x", "é" * 30)] == [None] * 5


def test_a_role_may_what_lesser_ones_may():
    """Tune may approve and read, read may read alone."""
    allowed = {role: [other for other in ROLES if Holder("x", role).may(other)] for role in ROLES}
    assert allowed == {"read": ["read"], "approve": ["read", "approve"], "tune": ["read", "approve", "tune"]}


def test_a_file_is_read_again_when_it_changes(path):
    """A token that was taken away is nobody's at once; an edit that is none takes nothing away."""
    tokens = TokenFile(path)
    path.write_text(FILE.replace(READ, "another-" + READ))
    assert tokens.holder(READ) is None
    assert tokens.holder("another-" + READ) == Holder("prometheus", "read")
    path.write_text("nonsense\n")
    assert tokens.holder(TUNE) == Holder("agent", "tune")
    path.unlink()
    assert tokens.holder(TUNE) == Holder("agent", "tune")


def test_a_file_that_becomes_readable_later_is_read_again(path, monkeypatch):
    """Root writes it, a call comes, and then it is given to the process's user: the token taken away is nobody's."""

    def refused(path):
        raise DocumentError([f"{path} cannot be read: Permission denied"])

    tokens = TokenFile(path)
    path.write_text(FILE.replace(READ, "another-" + READ))
    with monkeypatch.context() as unreadable:
        unreadable.setattr("tiertune_connector.httpd.tokens.read_text", refused)
        assert tokens.holder(READ) == Holder("prometheus", "read")
    seen = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == seen:  # a slow clock may show one time for two changes
        path.chmod(0o600)
    assert tokens.holder(READ) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "t:1:1: there is no token"),
        ("read x\n", "t:1:1: write: role name token"),
        (f"\nadmin x {READ}\n", "t:2:1: the role is one of read, approve, tune"),
        (f"read x/y {READ}\n", "t:1:1: a name has letters"),
        (f"read x {READ}#2\n", "t:1:1: a token has no #, and a comment has a space before its own"),
        ("read x short\n", "t:1:1: a token has at least 20 characters"),
        (f"read x {READ}\ntune y {READ}\n", "t:2:1: the token stands here a second time"),
    ],
)
def test_a_bad_line_is_told_without_its_token(text, said):
    """The place and what to mend; never the token."""
    with pytest.raises(DocumentError) as caught:
        parse(text, "t")
    assert str(caught.value).startswith(said)
    assert len(caught.value.problems) == 1
    assert READ not in str(caught.value)


@given(st.lists(st.floats(0, 100), max_size=60))
def test_a_limit_lets_so_many_pass(gaps):
    """Never more than what may come at once and what time gave back."""
    now = [0.0]
    limit, taken = Limit(0.5, 3.0, lambda: now[0]), 0
    for gap in gaps:
        now[0] += gap
        taken += limit.admits("a")
    assert min(3, len(gaps)) <= taken <= 3 + 0.5 * now[0] + 1e-6
    assert limit.admits("b")


def test_a_limit_gives_back_one_by_one():
    """As its rate says, until all may come again."""
    now = [62.5]
    limit = Limit(0.5, 3.0, lambda: now[0])

    def passing():
        count = 0
        while limit.admits("a"):
            count += 1
        return count

    passed = []
    for pause in (0.0, 1.875, 0.125, 4.0, 1000.0):
        now[0] += pause
        passed.append(passing())
    assert passed == [3, 0, 1, 2, 3]


def test_so_many_callers_are_remembered_as_called_last(monkeypatch):
    """Whoever makes up addresses fills no memory, and frees nobody who goes on."""
    monkeypatch.setattr("tiertune_connector.httpd.guarded.CALLERS", 2)
    limit = Limit(0.5, 1.0, lambda: 0.0)
    for caller in "abac":
        limit.admits(caller)
    assert [limit.admits(caller) for caller in "acb"] == [False, False, True]


# -- at a store


@pytest.fixture
def store(home, path):
    with running(home, http={"port": 0, "tokens_file": path}) as process:
        yield process


@pytest.fixture
def http(store):
    http = Http(store.address)
    yield http._http
    http.close()


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def test_on_loopback_reading_is_free_and_writing_is_not(http):
    """Status, counters and metrics need no token; samples and every writing path do."""
    free = ("/healthz", "/metrics", "/v1/status", "/v1/counters", "/v1/tuning")
    assert [http.get(path).status_code for path in free] == [200] * 5
    asked = [http.get("/v1/samples"), http.post("/v1/flush", json=FLUSH), http.post("/v1/bypass", json={"on": True})]
    asked += [http.put("/v1/tuning", json={}), http.put("/v1/sampling", json={})]
    assert [answer.status_code for answer in asked] == [401] * 5
    assert asked[0].headers["www-authenticate"] == "Bearer"
    assert "token" in asked[0].json()["message"]


def test_a_role_opens_what_it_is_for(http, store):
    """Who reads may read samples, and not tune; whose token tunes may do both."""
    assert http.get("/v1/samples", headers=bearer(READ)).status_code == 200
    refused = http.post("/v1/bypass", json={"on": True}, headers=bearer(APPROVE))
    assert (refused.status_code, store.store.tuning.bypass) == (403, False)
    assert "anna has the role approve; this asks for tune" in refused.json()["message"]
    assert http.post("/v1/bypass", json={"on": True}, headers=bearer(TUNE)).status_code == 200
    assert store.store.tuning.bypass


def test_on_another_address_reading_asks_too(home, path):
    """All but the health: whoever reaches the address is not of this host, and may call it by any name."""
    with (
        running(home, http={"host": "0.0.0.0", "port": 0, "tokens_file": path}) as process,
        Http(process.address.replace("0.0.0.0", "127.0.0.1")) as http,
    ):
        ask = http._http.get
        assert ask("/healthz").status_code == 200
        assert [ask(each).status_code for each in ("/metrics", "/v1/status", "/v1/counters")] == [401] * 3
        assert ask("/metrics", headers=bearer(READ) | {"Host": "store-a.example"}).status_code == 200


@pytest.mark.parametrize("name", ["", "another"])
def test_trying_tokens_is_slowed_down(http, name):
    """After so many that are none a source is refused for a while, whoever it says it calls for; one that is passes."""

    def tried(number):
        says = {"X-Forwarded-For": f"10.0.0.{number}"} if name else {}
        return http.get("/v1/samples", headers=bearer(f"guess-{number}") | says)

    answers = [tried(number) for number in range(int(ERRORS_AT_ONCE) + 2)]
    assert [answer.status_code for answer in answers] == [401] * int(ERRORS_AT_ONCE) + [429] * 2
    assert answers[-1].headers["retry-after"] == str(round(1 / ERRORS_PER_S))
    assert http.get("/v1/samples", headers=bearer(READ)).status_code == 200


def test_who_writes_too_often_is_asked_to_wait_a_second():
    """Not for as long as who tries tokens."""
    ok = PlainTextResponse("done")
    app = behind_tokens(
        ok,
        holder_of=lambda _: Holder("agent", "tune"),
        role_of=lambda *_: "tune",
        refuse=lambda _, status, message: PlainTextResponse(message, status),
        clock=lambda: 0.0,
    )

    async def write():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://store") as http:
            return [await http.put("/v1/tuning") for _ in range(int(WRITES_AT_ONCE) + 1)]

    *answers, refused = asyncio.run(write())
    assert {answer.status_code for answer in answers} == {200}
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.text == "more than 10 writing calls a second of agent"


@pytest.mark.parametrize("host", ["x/healthz?", "x/healthz#", "healthz"])
def test_what_a_call_names_as_host_opens_nothing(http, store, host):
    """A path is what routes go by: what stands in Host is no part of it."""
    refused = http.post("/v1/bypass", json={"on": True}, headers={"Host": host})
    assert (refused.status_code, store.store.tuning.bypass) == (401, False)


@pytest.mark.parametrize("spelling", ["/v1/bypass%0A", "//v1/bypass", "/v1/bypass/", "/V1/bypass", "/v1/../v1/bypass"])
def test_no_spelling_of_a_path_opens_it(http, store, spelling):
    """However it is written, nothing is done without a token."""
    assert http.post(spelling, json={"on": True}).status_code >= 400
    assert not store.store.tuning.bypass
