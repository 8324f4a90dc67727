"""Optimizer state in training's checkpoints: names, boxes, and the checks before a load."""
