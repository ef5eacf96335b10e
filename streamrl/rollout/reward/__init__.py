"""Reward functions (`rew_inf`), run in processes of their own with a time limit. `functions.py` says how to add one."""
