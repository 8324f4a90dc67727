"""Optimizers side by side, from a checkout: ``python -m benchmarks``."""
