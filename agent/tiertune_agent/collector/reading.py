"""Reads an answer whole: within a time, and up to a size, whatever the server does."""

import time

import httpx

MOST_BYTES = 64 << 20


def read_whole(http: httpx.Client, url: str, *, within_s: float, **options: object) -> httpx.Response:
    """GET ``url``. httpx.HTTPError where that fails, takes longer in all, or the answer is larger than MOST_BYTES."""
    until, parts, size = time.monotonic() + within_s, [], 0
    with http.stream("GET", url, **options) as answer:  # type: ignore[arg-type]
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES:
                raise httpx.ReadError(f"the answer has more than {MOST_BYTES} bytes")
            if time.monotonic() > until:
                raise httpx.ReadTimeout(f"the answer took more than {within_s:g} s")
        whole = httpx.Response(
            answer.status_code, headers=_told(answer), content=b"".join(parts), request=answer.request
        )
    return whole.raise_for_status()


def _told(answer: httpx.Response) -> list[tuple[str, str]]:
    """Without those of a body that is decoded by now."""
    return [
        (name, value) for name, value in answer.headers.items() if name not in ("content-encoding", "content-length")
    ]
