"""Command-line flags of Megatron's training code that a CPU run needs."""

from __future__ import annotations


def default_flags() -> list[str]:
    """Flags to append to a ``pretrain`` command line where the user has not given them.

    Only what the CPU dictates: no tokenizer, no sizes, no precision.  A flag that takes a value is
    directly followed by it.

    Returns:
        Flags in the order they may be appended to ``sys.argv``.
    """
    return [
        "--distributed-backend",
        "gloo",
        # Transformer Engine has no CPU implementation.
        "--transformer-impl",
        "local",
        # Each of these selects a CUDA kernel, or a function that is only fast when compiled.
        "--no-persist-layer-norm",
        "--no-gradient-accumulation-fusion",
        "--no-masked-softmax-fusion",
        "--no-rope-fusion",
        "--no-bias-gelu-fusion",
        "--no-bias-swiglu-fusion",
        "--no-bias-dropout-fusion",
        # Forked loader processes cost more than the tiny batches they would prepare.
        "--num-workers",
        "0",
    ]
