"""Writes the table of tested layouts to docs/support.md, from the results of the last test run.

``make support-matrix`` runs ``tests/distributed/test_layouts.py`` and then this script;
``build/layouts.json`` must contain all cases of ``tests/distributed/layouts.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.distributed.layouts import CASES, Case
from tests.tiny_models import MODELS

BEGIN, END = "<!-- layouts: begin -->", "<!-- layouts: end -->"


def shown(case: Case) -> str:
    """Return a layout as text."""
    return f"{case.layout} ({case.note})" if case.note else str(case.layout)


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table, one row per model.

    Args:
        found: Case name to the errors measured by the test.
    """
    lines = ["| model | layouts | largest error of an update |", "|---|---|---|"]
    for key, model in MODELS.items():
        cases = [case for case in CASES if case.model == key]
        worst = max(found[case.name]["matrix"] for case in cases)
        layouts = ", ".join(shown(case) for case in cases)
        lines.append(f"| {model.what} | {layouts} | {worst:.0e} |")
    return "\n".join(lines)


def main() -> int:
    """Rewrite the part of docs/support.md between the markers."""
    path = ROOT / "build" / "layouts.json"
    if not path.exists():
        print(f"{path.name} is missing: type make support-matrix")
        return 1
    found = json.loads(path.read_text(encoding="utf-8"))
    missing = [case.name for case in CASES if case.name not in found]
    if missing:
        print(f"not in {path.name}: {', '.join(missing)}; type make support-matrix")
        return 1
    page = ROOT / "docs" / "support.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
