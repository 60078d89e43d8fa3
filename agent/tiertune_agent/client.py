"""The command line's calls to an agent, or directly to a store."""

import os
import re
from typing import Any

import httpx

from tiertune_agent.credentials import CA_FILE, from_environment, turned_away
from tiertune_agent.network import CallError, asked_whole, calling, json_of
from tiertune_agent.terminal.options import InputError, printable

NO_PATH = {"detail": "Not Found"}
"""What a web framework answers for a path that it does not serve: then the server is not ours."""
ASKED_WRONGLY = (httpx.codes.NOT_FOUND, httpx.codes.UNPROCESSABLE_ENTITY)
_UNKNOWN = re.compile("CERTIFICATE_VERIFY_FAILED.*(self.signed|issuer certificate)")
"""Of an authority that is not trusted; not of a certificate that expired or has another name."""
START = "start it, or name its address by"
TRUST = f"name the authority that signed its certificate in {CA_FILE}"


def call(method: str, url: str, path: str, body: object = None, *, what: str = "agent", timeout_s: float = 30.0) -> Any:  # noqa: ANN401 (JSON)
    """The JSON that ``url`` answers. InputError or CallError if it refuses, or nobody answers in time.

    ``timeout_s`` bounds one operation; the whole answer may take twice as long.
    """
    with from_environment(os.environ).client(base_url=url, timeout=timeout_s) as http:
        try:
            with calling(what, url):
                answer = asked_whole(http, method, path, json=body)
                document = printable(json_of(answer))
        except CallError as error:
            mend = f"; {TRUST}" if _UNKNOWN.search(str(error)) and CA_FILE not in os.environ else f"; {START} --{what}"
            raise CallError(f"{error}{mend}") from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise InputError(f"{url} {turned_away(http)}")
    if answer.status_code == httpx.codes.NOT_FOUND and document == NO_PATH:
        raise InputError(f"what answers at {url} is no {what}: mend the address")
    if answer.is_error:
        raise (InputError if answer.status_code in ASKED_WRONGLY else CallError)(_detail(document))
    return document


def _detail(document: Any) -> str:  # noqa: ANN401 (JSON)
    detail = document.get("detail", document.get("message")) if isinstance(document, dict) else document
    if isinstance(detail, list):
        told = (f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in detail)
        return "; ".join(told)
    return str(detail)
