"""What is sent to the agent: too much, and what no JSON can hold."""

import asyncio
import json

import pytest

from tiertune_agent.web.api import MOST_BYTES
from tiertune_connector.httpd.guarded import FOREIGN

JSON = {"Content-Type": "application/json"}
COMMANDS = ("freeze", "bypass", "flush")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("origin", "refusal", "read"),
    [
        (b"http://127.0.0.1", (413, f"the body has more than {MOST_BYTES} bytes"), MOST_BYTES + MOST_BYTES // 4),
        (b"http://evil.example", (403, FOREIGN), 0),
    ],
)
def test_a_long_body_is_not_read_to_its_end(http, command, origin, refusal, read):
    """A page of another site may send one, too: where it comes from is looked at before it, and nothing of it read."""
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"origin", origin)]
    call = {"type": "http", "method": "POST", "path": f"/api/v1/{command}", "query_string": b"", "headers": headers}
    heard, told = [], []

    async def receive():
        heard.append(MOST_BYTES // 4)
        return {"type": "http.request", "body": b"[" * heard[-1], "more_body": len(heard) < 100}

    async def send(message):
        told.append(message)

    asyncio.run(http.app(call, receive, send))
    assert (told[0]["status"], json.loads(told[1]["body"])["detail"]) == refusal
    assert sum(heard) == read


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("sent", [r'{"\ud800": 1}', r'{"reason": "\ud800"}', '{"reason": NaN}', '{"x": 1e999}'])
def test_what_is_wrong_is_told_without_it(http, command, sent):
    """Half a character and what is no number are no input, and no failure of the agent."""
    answer = http.post(f"/api/v1/{command}", content=sent, headers=JSON)
    assert answer.status_code == 422
    assert all(problem.keys() == {"type", "loc", "msg"} for problem in answer.json()["detail"])


def test_half_a_character_is_no_store_s_name(http):
    """What cannot be told back is refused as the other bodies are."""
    answer = http.post("/api/v1/bypass", content=r'{"on": true, "store": "\ud800"}', headers=JSON)
    assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["body", "store"])
