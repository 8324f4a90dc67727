"""``python -m megatron_muon.checkpoint``: runs the offline tool, ``megatron_muon.offline``."""

import os
import signal
import sys


def run() -> int:
    """Run the command line; imported late, as training imports this package without the tool."""
    # Until torch is imported there is nothing to unwind, so Ctrl-C needs no traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Before torch starts its thread pool, which does not survive forking worker processes.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from megatron_muon.offline.command import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
