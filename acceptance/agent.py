"""Requests of the claims to the agent of a demo's world."""

from typing import Any

import httpx

Json = Any


class AgentApi:
    """The agent's HTTP API; ``page`` is the URL of its page."""

    def __init__(self, page: str, http: httpx.Client) -> None:
        self._api = f"{page}api/v1"
        self._http = http

    def get(self, path: str) -> Json:
        return self._http.get(f"{self._api}/{path}").raise_for_status().json()

    def post(self, path: str) -> None:
        """Send a command."""
        self._http.post(f"{self._api}/{path}").raise_for_status()

    def decisions(self, tuner: str) -> list[Json]:
        """One tuner's decisions, oldest first."""
        told = self.get("decisions?limit=1000")["decisions"]
        return sorted((one for one in told if one["tuner"] == tuner), key=lambda one: int(one["id"]))

    def incidents(self, kind: str, host: str) -> list[str]:
        """Messages of open incidents."""
        told = [one for one in self.get("incidents")["incidents"] if one["closed_at"] is None]
        return [one["message"] for one in told if (one["kind"], one["store"]) == (kind, host)]
