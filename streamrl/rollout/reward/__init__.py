"""Reward functions (`rew_inf`), run in their own processes with a time limit; see `functions.py` to add one."""
