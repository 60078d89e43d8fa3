"""What kills an agent before one of its steps."""

import re

from sqlalchemy import event

WRITES = re.compile(r"^(INSERT INTO|UPDATE) (decisions|verdicts)|^UPDATE stores SET expected")


class Fuse:
    """Blows at the given step; a write to the history of change control is one, others are told by :meth:`step`."""

    def __init__(self, engine, step):
        self.left, self.blown = step, False
        event.listen(engine, "before_cursor_execute", self._written)

    def step(self):
        self.left -= 1
        if self.left == 0:
            self.blown = True
            raise KeyboardInterrupt

    def _written(self, _connection, _cursor, statement, *_rest):
        if WRITES.match(statement):
            self.step()
