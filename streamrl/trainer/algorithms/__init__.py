"""Advantages and losses: pure tensor functions with their formulas and sources."""
