"""Held-out accuracy while a pretrained model learns arithmetic: synchronously, and asynchronously at several η.

    python benchmarks/learning_gpu.py MODEL                   # gsm_symbolic of reasoning-gym
    python benchmarks/learning_gpu.py MODEL --gsm8k FOLDER    # GSM8K: train.jsonl and test.jsonl in FOLDER
    python benchmarks/learning_gpu.py --example chain_sum     # SmolLM2-135M on two cores, without a GPU
    python benchmarks/learning_gpu.py --dry-run               # a model of no size, two steps, on any machine

MODEL is the folder of an instruction-tuned checkpoint, such as Qwen2.5-0.5B-Instruct. Each run is
examples/grade_school.toml, or --example, with another `max_staleness`; its responses to the held-out problems are
greedy. The plot has the accuracy by step and by hours of training. For Qwen2.5-0.5B-Instruct on GSM8K it also shows
verl's published figures (https://verl.readthedocs.io/en/latest/algo/baseline.html): 49.6% before, and 56.7% after PPO.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import EXAMPLES, Row, latest, parser_of, report, run_example

from streamrl.models import SMOLLM2
from streamrl.records.evaluation import EVALUATIONS_FILE

EXAMPLE = "grade_school"
NAME = "learning_gpu"
PUBLISHED = {"before": 0.496, "after PPO": 0.567}
PUBLISHED_MODEL = "qwen2.5-0.5b-instruct"
TINY: Mapping[str, Any] = {
    "run.total_train_steps": 2,
    "evaluation.every": "1 steps",
    "evaluation.prompts": 2,
    "rollout.group_size": 2,
    "rollout.sampling.max_new_tokens": 8,
    "trainer.batch_groups": 2,
    "gserver.max_running": 8,
}
"""Settings of a dry run."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", nargs="?", help="folder of a checkpoint")
    parser.add_argument("--example", choices=("chain_sum", EXAMPLE), default=EXAMPLE, help=f"by default {EXAMPLE}")
    parser.add_argument("--gsm8k", type=Path, metavar="FOLDER", help="folder with train.jsonl and test.jsonl of GSM8K")
    parser.add_argument("--etas", type=int, nargs="+", default=[0, 4], help="values of staleness.max_staleness")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="settings of all runs")
    parser.add_argument("--dry-run", action="store_true", help="two steps of a model of no size")
    options = parser.parse_args()
    if options.example == EXAMPLE and not options.model and not options.dry_run:
        parser.error(f"name the folder of a model for {EXAMPLE}, or try the benchmark with --dry-run")
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as folder:
        settings = settings_of(options, Path(folder))
        rows: list[Row] = []
        for seed in options.seeds:
            for eta in options.etas:
                print(f"max_staleness {eta}, seed {seed} …", flush=True)
                where = {"run.dir": folder, "run.name": f"{eta}-{seed}"}
                run_example(
                    EXAMPLES / f"{options.example}.toml",
                    {**settings, **where, "staleness.max_staleness": eta, "run.seed": seed},
                )
                rows += rows_of(Path(folder) / f"{eta}-{seed}", eta=eta, seed=seed)
    name = f"{NAME}-dry-run" if options.dry_run else NAME
    task = "GSM8K" if options.gsm8k is not None else options.example
    report(name, {"model": options.model or "the example's", "task": task}, rows)
    published = options.gsm8k is not None and PUBLISHED_MODEL in str(options.model).lower()
    print(f"plot: {plot(rows, latest(f'{name}.png'), lines=PUBLISHED if published else {})}")


def settings_of(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the settings that all runs share, on top of the example; a model of no size is made in `folder`."""
    settings: dict[str, Any] = {"run.stop_at_reward": 2.0}
    if options.model:
        settings["model.path"] = options.model
    if options.gsm8k is not None:
        settings |= {
            "data.source": "jsonl",
            "data.path": options.gsm8k / "train.jsonl",
            "data.prompt_key": "question",
            "evaluation.data.path": options.gsm8k / "test.jsonl",
            "evaluation.prompts": 1319,  # all
        }
    if options.dry_run:
        settings |= {**TINY, "model.path": tiny_model(folder / "model")}
    return settings | dict(word.split("=", 1) for word in options.set)


def tiny_model(folder: Path) -> Path:
    """Write a model of SmolLM2's kind with random weights and SmolLM2's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from streamrl.config import load
    from streamrl.models import ensure_checkpoint

    whole = ensure_checkpoint(load(EXAMPLES / f"{EXAMPLE}.toml", [f"model.path={SMOLLM2}"]))
    sizes = {"hidden_size": 36, "intermediate_size": 36, "num_hidden_layers": 2, "head_dim": 4}
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(whole, **sizes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(whole).save_pretrained(folder)
    return folder


def rows_of(run_dir: Path, *, eta: int, seed: int) -> list[Row]:
    """Return a row for each evaluation: the step that it belongs to, the seconds of training until then, and its
    accuracy, the mean reward of greedy responses."""
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = {0: 0.0} | {step["step"]: step["metrics"]["run_seconds"] for step in steps}
    found = [json.loads(line) for line in (run_dir / EVALUATIONS_FILE).read_text().splitlines()]
    return [
        {
            "max_staleness": eta,
            "seed": seed,
            "step": each["policy_version"],
            "seconds": seconds[each["policy_version"]],
            "accuracy": each["reward_mean"],
            "prompts": each["prompts"],
            "response_tokens": each["response_length_mean"],
        }
        for each in found
    ]


def plot(rows: Sequence[Row], path: Path, *, lines: Mapping[str, float]) -> Path:
    """Plot the accuracy by step and by time, with `lines` of published figures; return `path`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, panel, scale in (("step", panels[0], 1.0), ("seconds", panels[1], 1 / 3600)):
        for eta, seed in _runs(rows):
            mine = [row for row in rows if (row["max_staleness"], row["seed"]) == (eta, seed)]
            places = [row[axis] * scale for row in mine]
            panel.plot(places, [row["accuracy"] for row in mine], "o-", ms=3, label=f"η = {eta}, seed {seed}")
        for number, (name, accuracy) in enumerate(lines.items()):
            panel.axhline(accuracy, ls="--" if number else ":", color="grey", label=f"verl, {name}")
        panel.set(xlabel="training step" if axis == "step" else "hours of training")
    panels[0].set(ylabel="accuracy on held-out problems")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _runs(rows: Iterable[Row]) -> list[tuple[int, int]]:
    return sorted({(row["max_staleness"], row["seed"]) for row in rows})


if __name__ == "__main__":
    main()
