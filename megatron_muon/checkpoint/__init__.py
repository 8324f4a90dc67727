"""Optimizer state on disk: its names and its geometry. No megatron, no process group."""
