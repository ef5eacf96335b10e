"""Workflows: how a prompt becomes a trajectory. `base.py` says how to write one; the others are examples."""
