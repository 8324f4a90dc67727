"""Megatron and our step at true scale on a machine without a GPU: a fake world.

Tensors are torch's fake tensors on ``cuda`` (shapes, dtypes and devices without storage), the
process groups are of torch's "fake" backend (every collective returns at once), and this process is
one rank of as many as one likes. Megatron's own parser, model builder, ``DistributedDataParallel``
and our own optimizer run unmodified; what they allocate, launch and send is counted.

``fake_cuda``         what Megatron asks of a CUDA driver
``fake_groups``       process groups of a world in which one rank exists
``megatron_patches``  what Megatron does to tensors that fake ones cannot follow
``script``            runs a training script until its optimizer is built
``counting``          kernel launches, FLOPs, host reads and bytes alive, by operation
``step``              one step of any rank of a plan
``stage``             one pipeline stage as plain data, in a process of its own
``upstream``          what megatron-core's own muon would do
``devices``           rates of GPUs, and ``prediction``, times by them
``command``           ``python -m megatron_muon.plan``; ``text`` is its report

Everything is replaced for the life of the process: use a process of its own (``plan`` forks one for
each pipeline stage).
"""
