"""Command line of the launcher: ``torchrun … -m megatron_muon.launch pretrain_gpt.py …``."""

import sys

from megatron_muon.integration.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
