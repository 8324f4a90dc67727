"""The same as ``python -m megatron_muon.checkpoint``, from a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_muon.checkpoint.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
