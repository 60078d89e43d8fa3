"""A small engine on loopback, as vLLM's OpenAI server answers: models, completions, the reset of its prefix cache."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from e2e.servers import Quiet, serving


@dataclass
class FakeEngine:
    """What a test sets, and what the engine was asked."""

    url: str = ""
    key: str = ""
    """What callers have to show; empty: nothing."""
    dev_mode: bool = True
    running: int = 0
    """So many resets are refused before requests have ended."""
    longest: int = 1000
    """Tokens; a longer prompt is refused."""
    models: dict = field(default_factory=lambda: {"data": [{"id": "llama"}, {"id": "adapter"}]})
    asked: list[dict] = field(default_factory=list)
    resets: list[str] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    """Shared with others: who was called, in which order."""
    at_once: int = 0
    most_at_once: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    """Completions wait for it."""
    mutex: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self):
        self.gate.set()

    def complete(self, body):
        """Status and document."""
        with self.mutex:
            self.asked.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.gate.wait(20)
        with self.mutex:
            self.at_once -= 1
            return self._completed(body)

    def _completed(self, body):
        prompt = body["prompt"]
        tokens = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        if tokens > self.longest:
            return 400, {"error": {"message": f"maximum context length is {self.longest} tokens", "code": 400}}
        return 200, {"choices": [{"text": "a"}], "usage": {"prompt_tokens": tokens, "completion_tokens": 1}}

    def reset(self, query):
        """Status and document."""
        with self.mutex:
            self.resets.append(query)
            self.order.append(self.url)
            if not self.dev_mode:
                return 404, {"detail": "Not Found"}
            done = self.running == 0
            self.running = max(0, self.running - 1)
            return 200, {"success": done}


@contextmanager
def fake_engine(**settings) -> Iterator[FakeEngine]:
    """Serves until the block ends."""
    engine = FakeEngine(**settings)

    class Handler(Quiet, BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(200, engine.models)

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path, _, query = self.path.partition("?")
            self.answer(*(engine.reset(query) if path == "/reset_prefix_cache" else engine.complete(json.loads(body))))

        def answer(self, code, document):
            if engine.key and self.headers.get("Authorization") != f"Bearer {engine.key}":
                code, document = 401, {"error": "Unauthorized"}
            text = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    with serving(Handler) as server:
        engine.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield engine
        finally:
            engine.gate.set()
