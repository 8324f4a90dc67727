"""Command-line flags of Megatron's training code that a CPU run requires."""

from __future__ import annotations


def default_flags() -> list[str]:
    """Return flags to append to a ``pretrain`` command line where the user has not set them.

    Only flags required by the CPU: no tokenizer, sizes or precision. A flag's value directly
    follows it.
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
        # Loader processes cost more than preparing the tiny batches.
        "--num-workers",
        "0",
    ]
