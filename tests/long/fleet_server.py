"""Many stores in one process: ``python fleet_server.py NUMBER`` prints their ports, then answers until its end.

Each answers as a real store would (``store.json``, of the demo); with every question for counters a window has passed.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

SAMPLE = json.loads((Path(__file__).parent / "store.json").read_text())
WINDOW_S = 15.0


def _counters() -> dict[str, Any]:
    """What a store told in a window, as the tables of ``/v1/counters``: name to labels and rows."""
    metrics: dict[str, Any] = {}
    for place in SAMPLE["windows"]:
        own = {name: place[name] for name in ("namespace", "model", "tier") if place[name]}
        for series, value in place["values"].items():
            name, _, inner = series.rstrip("}").partition("{")
            labels = {**dict(pair.split("=", 1) for pair in inner.split(",") if pair), **own}
            table = metrics.setdefault(name, {"labels": list(labels), "rows": []})
            if table["labels"] == list(labels):
                table["rows"].append([*labels.values(), *_cells(value)])
    return metrics


def _cells(value: Any) -> list[Any]:
    if not isinstance(value, dict):
        return [value]
    buckets = [0.0] * 30
    for index, count in value["buckets"].items():
        buckets[int(index)] = count
    return [buckets, value["sum"], value["count"]]


def _grown(metrics: dict[str, Any], windows: float) -> dict[str, Any]:
    """Counters after so many windows; gauges stay."""
    return {
        name: {"labels": table["labels"], "rows": [_times(row, windows) for row in table["rows"]]}
        if name.endswith(("_total", "_seconds"))
        else table
        for name, table in metrics.items()
    }


def _times(row: list[Any], windows: float) -> list[Any]:
    return [
        [each * windows for each in cell]
        if isinstance(cell, list)
        else cell
        if isinstance(cell, str)
        else cell * windows
        for cell in row
    ]


class Store:
    def __init__(self, name: str, metrics: dict[str, Any]) -> None:
        self._name, self._metrics = name, metrics
        self._windows = 0
        self._status = json.dumps({**SAMPLE["status"], "store": name, "version": "0.1.0"}).encode()
        self._tuning = json.dumps(SAMPLE["tuning"]).encode()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            path = head.split()[1].decode()
            length = 0
            while (line := await reader.readline()) not in (b"\r\n", b""):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            await reader.readexactly(length)
            status, body = self._answer(path)
            fixed = (
                f'HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nETag: "{SAMPLE["tuning"]["version"]}"\r\n'
            )
            writer.write(f"{fixed}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
        writer.close()

    def _answer(self, path: str) -> tuple[int, bytes]:
        if path.startswith("/v1/counters"):
            self._windows += 1
            time_s = 1.5e9 + self._windows * WINDOW_S
            known = {"store": self._name, "boot_id": "b", "seq": 1, "since": None, "time_s": time_s}
            return 200, json.dumps({**known, "metrics": _grown(self._metrics, self._windows)}).encode()
        if path == "/v1/status":
            return 200, self._status
        return (200, self._tuning) if path == "/v1/tuning" else (404, b"{}")


async def main(number: int) -> None:
    metrics = _counters()
    servers = [
        await asyncio.start_server(Store(f"host-{index:03}", metrics).serve, "127.0.0.1", 0) for index in range(number)
    ]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
