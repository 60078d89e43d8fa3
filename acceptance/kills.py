"""An agent killed (SIGKILL) before any step of a change or a rollback makes nothing twice and leaves nothing half."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from acceptance.fleet import SLOW_BYTES_PER_S, Fleet, expect, fleet
from acceptance.gates import SETUP, WITHIN_S
from acceptance.traffic import everyday
from tiertune_agent.demo.world import HOSTS
from tiertune_agent.records import STANDING

POLICY = """\
version: 1
mode: observe
guard: {changes_per_hour: 100000, min_requests: 4, soak: 0.1s}
tuners:
  remote_fetch: {mode: auto, period: 1s, hold_off: 0s, disable_after: 2, enable_after: 2}
overrides:
  - {match: {store: host-b}, tuners: {remote_fetch: {mode: observe}}}
"""
"""Only one host is tuned, so that all steps are of one change. A change that was rolled back is soon tried again."""
HOST = HOSTS[0]
FUSED = Path(__file__).with_name("fused.py")
FUSE = "fuse.json"
STEPS = {"change": range(1, 11), "rollback": range(1, 8)}
"""All steps of each: one more would come after its end."""
SHORT = {"change": (3, 6), "rollback": (5,)}
"""Killed there: the store was not told yet; the store was changed, history not; the same in a rollback."""
UNDER_WAY = ("proposed", "approved")


def prove(*, short: bool) -> str:
    """A kill before each step of a change and of a rollback; in short before three."""
    setup = replace(SETUP, policy=POLICY, agent=(str(FUSED), FUSE))
    with fleet(setup, everyday(), files={FUSE: _fuse("change", 0)}) as made:
        made.world.until(lambda: made.hits("remote", HOST) > 0, "engines find chunks in the remote", WITHIN_S)
        made.serving(20)
        first = made.tuning(HOST)["version"]
        kills = Kills(made)
        for step in SHORT["change"] if short else STEPS["change"]:
            kills.change(step)
        for step in SHORT["rollback"] if short else STEPS["rollback"]:
            kills.rollback(step)
        grew = made.tuning(HOST)["version"] - first
        expect(grew == kills.made, f"{kills.made} changes and rollbacks made {grew} versions of the tuning")
        verified = made.unharmed()
    before = ", ".join(dict.fromkeys(kills.before))
    return (
        f"killed {len(kills.before)} times ({before}), the agent started again and ended what it had begun: "
        f"{kills.made} changes and rollbacks made {grew} versions of the store's tuning, each one; "
        f"all {verified} chunks that were read were right"
    )


class Kills:
    """Makes the agent change one store, by the speed of its link, and rolls changes back."""

    def __init__(self, made: Fleet) -> None:
        self._fleet = made
        self._file = Path(made.world.folder) / FUSE
        self._on = True
        """Whether fetching should be on."""
        self.made = 0
        """Changes and rollbacks."""
        self.before: list[str] = []
        """What the agent was about to do when it was killed."""

    def change(self, step: int) -> None:
        """Change the link's speed, so that the agent decides; it is killed before the step."""
        seen = self._newest()
        self._light("change", step)
        self._turn_link()
        self._dies(f"step {step} of a change")
        self._made_once(seen)

    def rollback(self, step: int) -> None:
        """A change is rolled back by command, and the agent is killed before the step."""
        seen = self._newest()
        self._turn_link()
        self._made_once(seen)
        number = self._newest()
        self._light("rollback", step)
        self._turn_link()  # now the state before the change is right, so the agent wishes nothing else
        self._command(number)
        self._dies(f"step {step} of a rollback")
        if not self._wished(number):
            self._command(number)  # killed before anything was written, so the command got no answer
        self._until(lambda: self._state(number) == "rolled_back" and self._as_wished(), f"{number} is rolled back")
        self.made += 1
        self._one_version()

    def _light(self, of: str, step: int) -> None:
        self._blown.unlink(missing_ok=True)
        self._say(_fuse(of, step))

    def _say(self, text: str) -> None:
        """Write it atomically: the agent may read the file at any moment."""
        new = self._file.with_suffix(".new")
        new.write_text(text)
        new.replace(self._file)

    @property
    def _blown(self) -> Path:
        return self._file.with_name(f"{FUSE}.blown")

    def _turn_link(self) -> None:
        self._on = not self._on
        self._fleet.world.limit(0.0 if self._on else SLOW_BYTES_PER_S)

    def _dies(self, where: str) -> None:
        """Wait for the kill, and start the agent again without a fuse."""
        self._fleet.lost("agent", WITHIN_S)
        expect(self._blown.exists(), f"the agent ended before it came to {where}")
        self.before.append(f"before it {self._blown.read_text()}")
        self._say(_fuse("change", 0))
        self._fleet.world.start_agent()
        self._until(self._leads, "the agent leads again")

    def _leads(self) -> bool:
        try:
            return bool(self._fleet.agent.get("fleet")["leader"])
        except httpx.HTTPError:  # not there yet
            return False

    def _made_once(self, seen: int) -> None:
        """Wait until nothing is under way; expect one standing decision after ``seen``, and one change of the store."""

        def over() -> bool:
            states = [one["state"] for one in self._after(seen)]
            return bool(states) and not set(states) & set(UNDER_WAY) and self._as_wished()

        self._until(over, f"fetching is {'on' if self._on else 'off'}, and nothing is under way")
        states = [one["state"] for one in self._after(seen)]
        stand = [state for state in states if state in STANDING]
        expect(len(stand) == 1, f"one change was to be made, decisions are {states}")
        self.made += 1
        self._one_version()

    def _one_version(self) -> None:
        version = self._fleet.tuning(HOST)["version"]
        expect(version == 1 + self.made, f"{self.made} changes and rollbacks, and the tuning has version {version}")

    def _as_wished(self) -> bool:
        return bool((self._fleet.tuning(HOST)["tiers"]["remote"]["fetch"] == "on") == self._on)

    def _command(self, number: int) -> None:
        with suppress(httpx.HTTPError):  # killed, it does not answer
            self._fleet.agent.post(f"decisions/{number}/rollback")

    def _wished(self, number: int) -> bool:
        """Whether it is rolled back, or about to be."""
        told = self._fleet.agent.get(f"decisions/{number}")
        return bool(told["state"] == "rolled_back" or told.get("undo"))

    def _state(self, number: int) -> str:
        return str(self._fleet.agent.get(f"decisions/{number}")["state"])

    def _newest(self) -> int:
        return max((int(one["id"]) for one in self._after(0)), default=0)

    def _after(self, number: int) -> list[dict[str, Any]]:
        made = self._fleet.agent.decisions("remote_fetch")
        return [one for one in made if one["id"] > number and one["store"] == HOST]

    def _until(self, holds: Any, what: str) -> None:  # noqa: ANN401
        self._fleet.world.until(holds, what, WITHIN_S)


def _fuse(of: str, step: int) -> str:
    return json.dumps({"of": of, "step": step})
