"""Optimizer state on disk as training writes it: names, boxes, and the checks before a load."""
