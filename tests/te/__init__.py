"""Transformer Engine's own Python on CPU: its CUDA extension is ``extension``."""
