"""The rollout workers: prompts become groups of scored trajectories."""
