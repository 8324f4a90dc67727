"""Dry-runs a training command: ``python -m megatron_muon.plan --world-size N SCRIPT …``."""

import sys

from megatron_muon.dry_run.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
