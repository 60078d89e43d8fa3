"""Resets the prefix caches of engines by their own HTTP (vLLM's OpenAI server)."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import httpx

from tiertune_agent.credentials import PLAIN, Access
from tiertune_agent.fields import JsonDict
from tiertune_agent.network import CallError, asked_whole, at_once, calling, json_of, web_address
from tiertune_agent.terminal.options import InputError, parsed
from tiertune_connector.units import Clock

KEYS = ("TIERTUNE_ENGINE_KEY", "VLLM_API_KEY")
"""Environment variables with the engines' API key (``--api-key``)."""
RESET_TIMEOUT_S = 15.0
"""Of one operation; a call may take twice as long: the engine first waits for its transfers under way."""
PATIENCE_S, AGAIN_S = 5.0, 0.25
"""Requests that run, and chunks of the last ones on their way, make an engine refuse: it is tried again for so long."""
NO_ENDPOINT = "has no such endpoint: start it with VLLM_SERVER_DEV_MODE=1"
BUSY = "still computes requests: take it out of the routing, or try again"


def address(url: str) -> str:
    """``url`` without a slash at the end; ValueError unless it is ``http://host:port``, with a path or none."""
    such_as = "an engine's address as http://host:port"
    return web_address(url, such_as, login=f"the key stands in {KEYS[0]}").rstrip("/")


def addresses(urls: Iterable[str]) -> tuple[str, ...]:
    """The addresses given to a command; InputError says what is wrong with one."""
    return tuple(parsed("--engine", address, url) for url in urls)


def shown(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Headers with the key, if there is one. InputError for what no header can hold: sending it would tell it."""
    name, key = next(((name, key) for name in KEYS if (key := environment.get(name, "").strip())), ("", ""))
    if not (key.isascii() and key.isprintable()):
        raise InputError(f"{name}: a key has visible ASCII characters alone")
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass
class Engines:
    """The prefix caches of some engines."""

    urls: Sequence[str]
    access: Access = PLAIN
    """By which no token is shown, as engines have a key."""
    clock: Clock = time.monotonic
    """Gives monotonic seconds."""
    sleep: Callable[[float], None] = time.sleep

    def reset(self) -> dict[str, JsonDict]:
        """Empty each one's GPU prefix cache and staging; by address whether it acknowledged, or why not."""
        reasons = at_once(self._reset, self.urls)
        return {url: {"ok": not why, "reason": why or "ok"} for url, why in zip(self.urls, reasons, strict=True)}

    def _reset(self, url: str) -> str:
        """Why it did not reset; empty: it did."""
        until, asked = self.clock() + PATIENCE_S, f"{url}/reset_prefix_cache?reset_external=true"
        try:
            key = shown()
        except InputError as error:
            return str(error)
        with self.access.client(timeout=RESET_TIMEOUT_S, headers=key) as http:
            while True:
                try:
                    with calling("engine"):
                        # reset_external empties staging, too, after its transfers: else chunks there are stored again.
                        why = _refused(asked_whole(http, "POST", asked))
                except CallError as error:
                    return str(error)
                if why != BUSY or self.clock() >= until:
                    return why
                self.sleep(AGAIN_S)


def _refused(answer: httpx.Response) -> str:
    """As ``_reset``. ValueError if no engine answers so."""
    if answer.status_code == httpx.codes.NOT_FOUND:
        return NO_ENDPOINT
    if not answer.is_success:
        return f"answered {answer.status_code}"
    told = json_of(answer)
    if not isinstance(told, dict) or not isinstance(told.get("success"), bool):
        raise ValueError("no answer to a reset")  # noqa: TRY004 (of another's answer)
    return "" if told["success"] else BUSY
