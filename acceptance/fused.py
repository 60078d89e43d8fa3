"""``tiertune`` with a fuse: the agent kills itself (SIGKILL) before a given step of its next change or rollback.

``python fused.py FILE agent run ...``: FILE says ``{"of": "change" | "rollback", "step": N}``; it is read when a change
or a rollback begins, and step 0 never kills. Steps are change control's writes to history, its calls to a store and
their answers, counted from the first write of a new change or of a wish to roll back. ``FILE.blown`` then names the
step before which the agent died.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, event

from tiertune_agent import cli
from tiertune_agent.run import Agent

if TYPE_CHECKING:
    from collections.abc import Callable

WRITES = re.compile(r"^(INSERT INTO|UPDATE) (decisions|verdicts)")
BEGINS = {"change": re.compile(r"^INSERT INTO decisions"), "rollback": re.compile(r"^UPDATE decisions SET .*\bundo=")}


class Fuse:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._left = 0
        """Steps left until the kill; 0: the fuse is not lit."""

    def written(self, _connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        """Called before each SQL statement."""
        if not self._left and WRITES.match(statement):
            told = json.loads(self._file.read_text())
            self._left = told["step"] if BEGINS[told["of"]].match(statement) else 0
        if WRITES.match(statement):
            self.step(f"writes {' '.join(statement.split()[:3])}")

    def step(self, what: str) -> None:
        """Called before ``what`` is done."""
        if not self._left:
            return
        self._left -= 1
        if not self._left:
            self._file.with_name(f"{self._file.name}.blown").write_text(what)
            os.kill(os.getpid(), signal.SIGKILL)


class Fused:
    """A store's client whose calls count as steps of the fuse."""

    def __init__(self, inner: Any, fuse: Fuse) -> None:  # noqa: ANN401 (anything that is tuned)
        self._inner = inner
        self._fuse = fuse

    def tuning(self) -> Any:  # noqa: ANN401
        self._fuse.step("reads the tuning")
        return self._inner.tuning()

    def put_tuning(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        self._fuse.step("puts the tuning")
        answer = self._inner.put_tuning(*args, **options)
        self._fuse.step("hears the answer")
        return answer


def main() -> None:
    fuse = Fuse(Path(sys.argv.pop(1)))
    event.listen(Engine, "before_cursor_execute", fuse.written)
    unfused: Callable[[Agent, str], Any] = Agent._client  # noqa: SLF001 (where change control meets stores)

    def client(agent: Agent, store: str) -> Fused | None:
        found = unfused(agent, store)
        return None if found is None else Fused(found, fuse)

    Agent._client = client  # type: ignore[assignment, method-assign]  # noqa: SLF001
    cli.main()


if __name__ == "__main__":
    main()
