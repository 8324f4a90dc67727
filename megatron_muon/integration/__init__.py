"""Megatron glue: flags, hooks, model metadata, the DistributedOptimizer subclass, start-up report.

The only package, with ``cpu``, that imports Megatron; so nothing is imported here.
"""
