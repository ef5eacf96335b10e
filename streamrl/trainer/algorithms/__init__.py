"""Advantages and losses with their formulas and sources; `registry.py` finds them by name."""
