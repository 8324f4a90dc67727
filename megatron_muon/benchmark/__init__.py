"""Optimizers side by side in one run: ``python -m megatron_muon.benchmark``."""
