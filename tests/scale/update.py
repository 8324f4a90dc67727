"""Rewrites the golden figures: ``python -m tests.scale.update``, all of them or the cases named.

Review the diff of ``figures.json``: every number in it is one that the change you make has changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.scale.figures import read_figures, table, write_figures
from tests.scale.measure import measure
from tests.scale.models import CASES


def main(names: Sequence[str]) -> int:
    """Measure cases and write their figures; the exit status."""
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"no such case: {unknown}; there are {list(CASES)}")
        return 2
    figures = read_figures()
    failed = []
    names = names or list(CASES)
    for name, found in zip(names, measure(names), strict=False):
        if "error" in found:
            failed.append(f"{name}\n{found['error']}")
        else:
            figures[name] = found
    write_figures({name: figures[name] for name in CASES if name in figures})
    print(table(figures))
    for failure in failed:
        print(f"\nFAILED {failure}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
