"""Which targets an override of a policy applies to."""

import re
from fnmatch import fnmatchcase

from tiertune_agent.records import Target
from tiertune_connector.documents import Document


class Match(Document):
    """Shell patterns; both must fit. A model pattern fits a tier if it fits every model that the tier serves."""

    model: str = "*"
    """Pattern of the served model's name."""
    store: str = "*"
    """Pattern of the store's name; ``fleet`` is the remote."""

    def fits(self, target: Target) -> bool:
        served = all(fnmatchcase(model, self.model) for model in target.models or ("",))
        return served and fnmatchcase(target.store, self.store)

    def meets(self, other: "Match") -> bool:
        """Whether both may fit the same target; true if in doubt."""
        return _may_meet(self.model, other.model) and _may_meet(self.store, other.store)


def _may_meet(one: str, other: str) -> bool:
    """Whether a name may fit both patterns: by matching if one is a plain name, else if their starts and ends agree."""
    parts, its_parts = (re.split(r"[*?\[\]]", each) for each in (one, other))
    if len(parts) == 1 or len(its_parts) == 1:
        return fnmatchcase(one, other) or fnmatchcase(other, one)
    head, longer_head = sorted((parts[0], its_parts[0]), key=len)
    tail, longer_tail = sorted((parts[-1], its_parts[-1]), key=len)
    return longer_head.startswith(head) and longer_tail.endswith(tail)
