"""Runs Megatron and our step at full scale on a machine without a GPU.

Tensors are torch's fake tensors on ``cuda`` (shapes, dtypes and devices without storage), process
groups use torch's "fake" backend (every collective returns immediately), and this process is one
rank of a world of any size. Megatron's parser, model builder, ``DistributedDataParallel`` and our
optimizer run unmodified; their allocations, launches and messages are counted.

``fake_cuda``         replaces the CUDA driver
``fake_groups``       process groups of a world with a single existing rank
``megatron_patches``  replaces operations that fake tensors do not support
``quantized``         FP8 weights without Transformer Engine
``script``            runs a training script until its optimizer is built
``counting``          kernel launches, FLOPs, host reads and allocated bytes, by operation
``step``              one step of any rank of a plan
``stage``             one pipeline stage as plain data, in its own process
``upstream``          load of megatron-core's own muon
``devices``           rates of GPUs, from which ``prediction`` computes times
``command``           ``python -m megatron_muon.plan``; ``text`` formats its report

Replacements last for the life of the process: use a separate process (``plan`` forks one per
pipeline stage).
"""
