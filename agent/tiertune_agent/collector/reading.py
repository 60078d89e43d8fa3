"""Reads an answer whole: within a time, and up to a size, whatever the server does."""

import time

import httpx

MOST_BYTES = 64 << 20


def read_whole(http: httpx.Client, url: str, *, within_s: float, **options: object) -> httpx.Response:
    """GET ``url``; httpx.HTTPError also where the answer says that something is wrong."""
    return asked_whole(http, "GET", url, within_s=within_s, **options).raise_for_status()


def asked_whole(http: httpx.Client, method: str, url: str, *, within_s: float, **options: object) -> httpx.Response:
    """Whatever is answered. httpx.HTTPError where nothing is, takes longer in all, or has more than MOST_BYTES."""
    until, parts, size = time.monotonic() + within_s, [], 0
    with http.stream(method, url, **options) as answer:  # type: ignore[arg-type]
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES:
                raise httpx.ReadError(f"the answer has more than {MOST_BYTES} bytes")
            if time.monotonic() > until:
                raise httpx.ReadTimeout(f"the answer took more than {within_s:g} s")
        return httpx.Response(
            answer.status_code, headers=_told(answer), content=b"".join(parts), request=answer.request
        )


def _told(answer: httpx.Response) -> list[tuple[str, str]]:
    """Without those of a body that is decoded by now."""
    return [
        (name, value) for name, value in answer.headers.items() if name not in ("content-encoding", "content-length")
    ]
