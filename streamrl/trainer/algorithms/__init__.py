"""Algorithms, one module each: advantages and losses with their formulas and sources (`registry.py`)."""
