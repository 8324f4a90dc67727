"""The offline tool: inspect, convert, import, export and verify; no Megatron, no process group.

A fault of a checkpoint, a file or a flag raises ``errors.CheckpointError``, whose text is the one
sentence that the user sees.
"""
