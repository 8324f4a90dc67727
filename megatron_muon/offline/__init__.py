"""The offline tool: inspect, convert, import, export and verify; no Megatron, no process group.

An invalid checkpoint, file or flag raises ``errors.CheckpointError``; its text is the sentence that
the user sees.
"""
