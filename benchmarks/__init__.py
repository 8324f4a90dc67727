"""Compares optimizers, from a checkout: ``python -m benchmarks``."""
