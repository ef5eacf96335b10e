"""Tokens trained on per second: streamrl's actor against plain loops and TRL, in one run.

    python benchmarks/bench_trainer.py [--quick] [--threads N] [--agents]

Groups of sibling responses with ragged (log-normal) lengths behind a common prompt go through one optimizer step of
GRPO: forward, backward, gradient clipping, AdamW, in float32. All contenders compute the same loss of the same tokens
and the same gradient, which is checked in every round, and count the sampled tokens only. With `--agents` (results:
bench_agents_trainer) a group is four episodes of eight turns behind one prompt, each with two branches after its fourth
turn.

| contender | layout of the sequences |
|---|---|
| `streamrl` | common beginnings of sequences once (`trainer.share_prefix`), without padding |
| `streamrl, separate` | the same with each sequence as a row of its own |
| `streamrl, calls` | of agents: each call of the model as a row, with its context |
| `streamrl, Megatron` | as `streamrl`, on Megatron Core in one process; needs `megatron.core` |
| `padded` | transformers and plain torch: micro-batches of padded sequences in the order of their arrival |
| `unpadded` | transformers and plain torch: sequences one after another, without padding |
| `TRL` | GRPOTrainer's loss, backward and optimizer step on given completions; needs `pip install trl==1.16.0` |

TRL pads all sequences to the longest prompt and the longest completion of the batch, and then cuts it into
micro-batches of equal numbers of sequences; several numbers are tried, and the fastest is reported. Its step includes
the entropy, as streamrl's does, and its own metrics; generation, rewards and advantages are left out for all. With
several turns, by tools or by a `rollout_func`, TRL has one row for each conversation; two branches have their
common part in both rows, and here under the loss in the first.

Rounds of the contenders alternate; medians over rounds are reported, of rates and of ratios within a round. `by CPU
time` counts the process's seconds of CPU instead of seconds: other load on the machine disturbs it less. These figures
do not hold on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from common import Row, parser_of, report
from numpy.typing import NDArray
from training_batch import (
    BRANCHES,
    EPISODES,
    LONGEST,
    MEAN,
    MICRO_TOKENS,
    PROMPT,
    SIBLINGS,
    SIGMA,
    TURN_TOKENS,
    TURNS,
    Contender,
    Found,
    Step,
    make_agents_groups,
    make_groups,
    sampled,
    trainable_tokens,
)
from training_contenders import PlainLoop, TRLStep, megatron_model, streamrl_contender, torch_model
from transformers import logging

from streamrl.config import from_dict
from streamrl.device import compute_with, resolve_device
from streamrl.models import ensure_checkpoint
from streamrl.types import TrajectoryGroup

LOSS_TOLERANCE = 1e-4
NORM_TOLERANCE = 1e-3
"""How far the contenders' losses, and relatively their gradients' norms, may be apart: they sum up in different
orders."""
TRL_SEQUENCES = (2, 4, 8, 16)
"""Sizes of TRL's micro-batches that are tried."""
SCRATCH = {"hidden_size": 256, "layers": 5, "heads": 4, "kv_heads": 2, "head_dim": 64}


class Case(NamedTuple):
    """A model, and the size of a batch."""

    name: str
    model: dict[str, Any]
    """The section [model]."""
    groups: int
    agents: bool = False
    """Whether groups are episodes of agents."""

    def make_groups(self, vocabulary: NDArray[np.int64], *, seed: int) -> list[TrajectoryGroup]:
        make = make_agents_groups if self.agents else make_groups
        return make(vocabulary, count=self.groups, seed=seed)


CASES = (
    Case("scratch-4.9M", {"path": "scratch", "scratch": SCRATCH}, 2),
    Case("SmolLM2-135M", {"path": "smollm2-135m-instruct"}, 1),
)


AGENTS_CASES = (Case("scratch-4.9M", {"path": "scratch", "scratch": SCRATCH}, 1, agents=True),)


def measure(case: Case, *, rounds: int) -> list[Row]:
    """Rows of one model."""
    folder = ensure_checkpoint(from_dict({"model": case.model}))
    vocabulary = trainable_tokens(folder)
    with ExitStack() as stack:
        contenders, notes = make_contenders(case, folder, case.make_groups(vocabulary, seed=0), stack)
        spent: dict[str, list[Spent]] = {contender: [] for contender in contenders}
        tokens = []
        for round_ in range(rounds + 1):
            groups = case.make_groups(vocabulary, seed=round_)
            tokens.append(sampled(groups))
            answers = {}
            for contender, (step, _) in contenders.items():
                answers[contender], took = timed(step, groups)
                spent[contender].append(took)
            check(answers)
            print(f"{case.name}: round {round_} of {rounds} done", flush=True)

    def rates_by(clock: Callable[[Spent], float]) -> dict[str, list[float]]:
        """Tokens per second of each contender in each round but the first, which warms up."""
        return {
            contender: [n / clock(took) for n, took in zip(tokens, of, strict=True)][1:]
            for contender, of in spent.items()
        }

    rates, cpu_rates = rates_by(lambda took: took.seconds), rates_by(lambda took: took.cpu_seconds)
    return [
        {
            "model": case.name,
            "groups": case.groups,
            "contender": contender,
            "tokens_computed": contenders[contender].computed(groups),
            "seconds_per_step": round(median(took.seconds for took in spent[contender][1:]), 3),
            "tokens_per_second": round(median(rates[contender]), 1),
            "ratio_to_padded": ratio(rates[contender], rates["padded"]),
            "ratio_by_cpu_time": ratio(cpu_rates[contender], cpu_rates["padded"]),
            "rounds": [round(rate, 1) for rate in rates[contender]],
            "cpu_rounds": [round(rate, 1) for rate in cpu_rates[contender]],
            "note": notes.get(contender, ""),
        }
        for contender in contenders
    ]


def ratio(rates: list[float], others: list[float]) -> float:
    """Median over rounds."""
    return round(median(rate / other for rate, other in zip(rates, others, strict=True)), 2)


def make_contenders(
    case: Case, folder: Path, trial: list[TrajectoryGroup], stack: ExitStack
) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders that can run here, and notes under the table, by contender."""
    model = torch_model(folder)
    plain = PlainLoop(folder)
    contenders = {
        "streamrl": streamrl_contender(model, share_prefix=True),
        "streamrl, separate": streamrl_contender(model, share_prefix=False),
    }
    if case.agents:
        contenders["streamrl, calls"] = streamrl_contender(model, share_prefix=False, by_call=True)
    contenders |= {"padded": plain.padded, "unpadded": plain.unpadded}
    notes = {}
    if importable("megatron.core") and importable("streamrl.trainer.backends.megatron.model"):
        megatron = stack.enter_context(megatron_model(folder))
        contenders["streamrl, Megatron"] = streamrl_contender(megatron, share_prefix=True)
        notes["streamrl, Megatron"] = f"{version('megatron-core')}; one process"
    if importable("trl"):
        trl = TRLStep(folder)
        trl.sequences = fastest(trl, trial)
        contenders["TRL"] = trl.contender
        notes["TRL"] = (
            f"{version('trl')}; padded to the longest of the batch, micro-batches of {trl.sequences} sequences"
        )
    return contenders, notes


def fastest(trl: TRLStep, groups: list[TrajectoryGroup]) -> int:
    """The number of sequences in a micro-batch with which `trl` is fastest on `groups`."""
    on_cpu = resolve_device("auto").type == "cpu"
    trl(groups)  # warms up
    seconds = {}
    for sequences in (number for number in TRL_SEQUENCES if number <= len(groups) * SIBLINGS):
        trl.sequences = sequences
        _, spent = timed(trl, groups)
        seconds[sequences] = spent.cpu_seconds if on_cpu else spent.seconds
    shown = ", ".join(f"{number}: {spent:.2f} s" for number, spent in seconds.items())
    print(f"TRL's step by sequences in a micro-batch: {shown}", flush=True)
    return min(seconds, key=lambda sequences: seconds[sequences])


class Spent(NamedTuple):
    seconds: float
    cpu_seconds: float
    """Processor time of all threads of the process."""


def timed(step: Step, groups: list[TrajectoryGroup]) -> tuple[Found, Spent]:
    """Return the result of `step` and its cost."""
    began, cpu_began = time.perf_counter(), time.process_time()
    found = step(groups)
    return found, Spent(time.perf_counter() - began, time.process_time() - cpu_began)


def check(answers: dict[str, Found]) -> None:
    """Exit unless all computed the same."""
    losses = [found.loss for found in answers.values()]
    norms = [found.grad_norm for found in answers.values()]
    alike = np.ptp(losses) <= LOSS_TOLERANCE and np.ptp(norms) <= NORM_TOLERANCE * min(norms)
    if not alike:  # nor if one is no number
        raise SystemExit(f"the contenders do not compute the same: {answers}")


def importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def main() -> None:
    parser = parser_of(__doc__, quick="the small model only, two rounds")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--agents", action="store_true", help="groups are episodes of agents")
    options = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    compute_with(options.threads)
    rounds = 2 if options.quick else 3
    rows: list[Row] = []
    for case in (AGENTS_CASES if options.agents else CASES)[: 1 if options.quick else None]:
        rows += measure(case, rounds=rounds)
    settings: dict[str, Any] = {"threads": options.threads, "rounds": rounds, "quick": options.quick}
    settings |= {"prompt_tokens": PROMPT, "microbatch_tokens": MICRO_TOKENS}
    if options.agents:
        settings |= {"episodes": EPISODES, "turns": TURNS, "branches": BRANCHES, "turn_tokens": TURN_TOKENS}
    else:
        settings |= {"siblings": SIBLINGS, "response_tokens": {"mean": MEAN, "sigma": SIGMA, "longest": LONGEST}}
    report("bench_agents_trainer" if options.agents else "bench_trainer", settings, rows)


if __name__ == "__main__":
    main()
