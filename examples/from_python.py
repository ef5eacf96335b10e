"""A run from Python: a reward function of this script, and a loop over training steps.

Try it:

    python examples/from_python.py
"""

from __future__ import annotations

import streamrl
from streamrl.rollout.reward.functions import Response
from streamrl.types import Prompt


def reward(response: Response, prompt: Prompt) -> float:
    """Return 1 for the right answer."""
    return float(response.text.strip() == prompt.answer)


if __name__ == "__main__":
    with streamrl.Run("examples/copy_scratch.toml", reward=reward, overrides={"run.total_train_steps": 40}) as run:
        for step in run:  # one item for each training step, as it happens
            print(step.policy_version, step.reward, step.metrics["importance_ratio_deviation"])
            if step.reward > 0.9:
                run.stop()
    print(run.summary["groups_lost"], run.dir)
