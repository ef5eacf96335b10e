"""The rollout pool: prompts become groups of scored trajectories, which are streamed to the trainer.

A workflow of your own: `workflows.py`. A reward function: `reward/functions.py`. A data source: `data.py`.
"""
