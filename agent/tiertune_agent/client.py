"""The command line's calls to an agent, or directly to a store."""

import os
import re
from contextlib import suppress
from typing import Any, NoReturn

import httpx

from tiertune_agent.credentials import CA_FILE, from_environment, turned_away
from tiertune_agent.fields import Json, JsonDict
from tiertune_agent.network import CallError, asked_whole, calling, json_of
from tiertune_agent.terminal.options import InputError, printable

NO_PATH = {"detail": "Not Found"}
"""What a web framework answers for a path that it does not serve: then the server is not ours."""
ASKED_WRONGLY = (httpx.codes.NOT_FOUND, httpx.codes.UNPROCESSABLE_ENTITY)
START = "start it, or name its address by --{what}"
MENDS = {
    "VERIFY_FAILED.*(self.signed|issuer certificate)": f"name the authority that signed its certificate in {CA_FILE}",
    "VERIFY_FAILED.*certificate (has expired|is not yet valid)": "renew its certificate, or set this machine's clock",
    "VERIFY_FAILED.*certificate is not valid for": "name it as its certificate does, by --{what}",
    "VERIFY_FAILED": "mend its certificate",
    "WRONG_VERSION_NUMBER|record layer failure": "it speaks no TLS: write http:// in --{what}",
    "at http:.*disconnected without sending": "if it speaks TLS, write https:// in --{what}; else see its log",
    "disconnected without sending": "see its log",
}
"""What to mend, by what is said of a server, the first that fits; of any other that does not answer ``START``."""
HANGS = "it is there, see its log; what was asked may still be done"
"""Of one that took the call, and did not answer in time."""


class _Answer(JsonDict):
    """An object; InputError says what is wrong where it lacks what is read of it."""

    def __init__(self, told: Json, foreign: str) -> None:
        super().__init__(told)
        self._foreign = foreign

    def __missing__(self, _: str) -> NoReturn:
        raise InputError(self._foreign)


def call(method: str, url: str, path: str, body: object = None, *, what: str = "agent", timeout_s: float = 30.0) -> Any:  # noqa: ANN401 (JSON)
    """The JSON that ``url`` answers. InputError or CallError if it refuses, or nobody answers in time.

    ``timeout_s`` bounds one operation; the whole answer may take twice as long.
    """
    with from_environment(os.environ).client(base_url=url, timeout=timeout_s) as http:
        try:
            with calling(what, url):
                answer = asked_whole(http, method, path, json=body)
                document = printable(json_of(answer))
                told = _detail(document) if answer.is_error and isinstance(document, dict) else ""
                if answer.is_server_error and not told:  # a proxy's that reaches nobody
                    answer.raise_for_status()
        except CallError as error:
            known = (mend for told, mend in MENDS.items() if re.search(told, str(error)))
            mend = HANGS if isinstance(error.__cause__, httpx.ReadTimeout) else next(known, START)
            raise CallError(f"{error}; {mend.format(what=what)}") from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise InputError(f"{url} {turned_away(http)}")
    foreign = f"what answers at {url} is no {what}: mend the address"
    if not isinstance(document, dict) or document == NO_PATH or (answer.is_error and not told):
        raise InputError(foreign)
    if answer.is_error:
        raise (InputError if answer.status_code in ASKED_WRONGLY else CallError)(told)
    return _Answer(document, foreign)


def _detail(document: Json) -> str:
    """What an error's answer says; empty: nothing that is ours to read."""
    detail = document.get("detail", document.get("message", ""))
    if isinstance(detail, list):
        with suppress(KeyError, TypeError):
            return "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in detail)
    return detail if isinstance(detail, str) else ""
