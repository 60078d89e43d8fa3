"""Sums up ``mutmut results --all true``: how many mutants were killed, by module, then the names of the others."""

import sys
from collections import Counter

KILLED = {"killed", "timeout"}
"""A mutant that never ends counts as killed, too."""
LEAST = 0.8
"""Share of each module's mutants that must be killed."""


def main() -> int:
    """Exit status: 1 if too few mutants of a module are killed, 2 if there are none."""
    told = [line.strip().rsplit(": ", 1) for line in sys.stdin if ": " in line]
    if not told:
        print("mutmut told of no mutant", file=sys.stderr)
        return 2
    module = {name: name.split(".x", 1)[0] for name, _ in told}
    every = Counter(module[name] for name, _ in told)
    killed = Counter(module[name] for name, state in told if state in KILLED)
    for each in sorted(every):
        print(f"{each}: {killed[each]} of {every[each]} killed, {killed[each] / every[each]:.0%}")
    for name, state in told:
        if state not in KILLED:
            print(f"  {state}: {name}")
    return int(any(killed[each] < LEAST * every[each] for each in every))


if __name__ == "__main__":
    sys.exit(main())
