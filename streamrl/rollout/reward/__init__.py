"""Reward functions (`rew_inf`), run in their own processes with a time limit. `functions.py` explains how to add one."""
