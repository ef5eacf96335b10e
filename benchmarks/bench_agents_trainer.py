"""What a training step on agents' episodes costs: conversations as trees, each call by itself, and TRL's way.

    python benchmarks/bench_agents_trainer.py [--quick] [--threads N]

Four episodes of eight turns behind one prompt; each goes on in two ways after its fourth turn. All contenders compute
the same loss of the same tokens and the same gradient, which is checked in every round, and count the sampled tokens
only; how they are measured is told in `bench_trainer.py`.

| contender | its rows |
|---|---|
| `streamrl` | what conversations begin with in common once, at any depth (`trainer.share_prefix`) |
| `streamrl, separate` | each conversation |
| `streamrl, calls` | each call of the model, with all that came before it as context |
| `streamrl, Megatron` | as `streamrl`, on Megatron Core in one process; needs `megatron.core` |
| `padded`, `unpadded` | each conversation; transformers and plain torch |
| `TRL` | each conversation, padded to the longest prompt and the longest completion; needs `trl` |

TRL's own way with several turns, be it by tools or by a `rollout_func`, is one row for each conversation: everything
after the first prompt is the completion, and what the policy did not sample in it is masked. It knows no branches: what
two conversations have in common is in both rows, and here under the loss in the first.
"""

from __future__ import annotations

from bench_trainer import SCRATCH, Case, options_of, run
from training_batch import BRANCHES, EPISODES, TURN_TOKENS, TURNS

CASES = (Case("scratch-4.9M", {"path": "scratch", "scratch": SCRATCH}, 1, agents=True),)


def main() -> None:
    options = options_of(__doc__)
    settings = {"episodes": EPISODES, "turns": TURNS, "branches": BRANCHES, "turn_tokens": TURN_TOKENS}
    run("bench_agents_trainer", CASES, options, settings)


if __name__ == "__main__":
    main()
