"""Tokens trained on per second: streamrl's torch backend against plain loops, in one run.

    python benchmarks/bench_trainer.py [--quick] [--threads N]

Groups of sibling responses with ragged (log-normal) lengths behind a common prompt go through one
optimizer step of GRPO: forward, backward, gradient clipping, AdamW. All contenders compute the same
loss of the same tokens, which is checked, and count the sampled tokens only:

| contender | how it lays the sequences out |
|---|---|
| `streamrl` | each group's prompt once, siblings behind it (`trainer.share_prefix`), rows of similar length |
| `streamrl, separate` | the same without sharing the prompt |
| `padded` | transformers and plain torch: micro-batches of padded sequences in the order of their arrival |
| `unpadded` | transformers and plain torch: sequences one after another, without padding |

Rounds of the contenders alternate; medians are reported.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from common import write_results
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, logging

from streamrl.config import from_dict
from streamrl.device import compute_with, resolve_device
from streamrl.models import ensure_checkpoint
from streamrl.trainer.backends.base import TrainItem
from streamrl.trainer.backends.torch import TorchBackend
from streamrl.types import TrajectoryGroup

MICRO_TOKENS = 4096
"""Of a micro-batch, for all contenders: padding counts."""
GROUPS, SIBLINGS, PROMPT = 2, 8, 64
MEAN, SIGMA, LONGEST = 64, 0.8, 256
TOLERANCE = 1e-3
"""How far the contenders' losses may be apart: they sum up in different orders."""
SCRATCH = {"hidden_size": 256, "layers": 5, "heads": 4, "kv_heads": 2, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "scratch-4.9M": {"path": "scratch", "scratch": SCRATCH},
    "SmolLM2-135M": {"path": "smollm2-135m-instruct"},
}

Step = Callable[[list[TrajectoryGroup]], float]
"""One optimizer step; answers the loss."""


def make_groups(vocabulary: int, *, seed: int) -> list[TrajectoryGroup]:
    """Random prompts and responses; log-probabilities near those of a uniform policy, so that ratios are near 1."""
    random = np.random.default_rng(seed)
    groups = []
    for seq in range(GROUPS):
        prompt = random.integers(0, vocabulary, PROMPT)
        drawn = random.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, SIBLINGS)
        lengths = np.clip(drawn.round(), 1, LONGEST).astype(int)
        parts = [np.concatenate([prompt, random.integers(0, vocabulary, n)]) for n in lengths]
        mask = np.concatenate([np.arange(PROMPT + n) >= PROMPT for n in lengths])
        groups.append(
            TrajectoryGroup(
                seq=seq,
                worker="rollout/0",
                prompt_length=PROMPT,
                seqlens=(lengths + PROMPT).astype(np.int32),
                rewards=random.random(SIBLINGS, dtype=np.float32),
                packed_input_ids=np.concatenate(parts).astype(np.int32),
                packed_loss_mask=mask,
                packed_behavior_logprobs=np.where(mask, np.float32(-np.log(vocabulary)), np.float32(0)),
                packed_policy_versions=np.where(mask, 0, -1).astype(np.int32),
                finish_reasons=["stop"] * SIBLINGS,
            )
        )
    return groups


def sampled(groups: list[TrajectoryGroup]) -> int:
    return sum(int(group.packed_loss_mask.sum()) for group in groups)


def streamrl_step(folder: Path, *, model: dict[str, Any], share_prefix: bool) -> Step:
    trainer = {"dtype": "float32", "max_tokens_per_microbatch": MICRO_TOKENS, "share_prefix": share_prefix, "lr": 1e-6}
    config = from_dict({"model": model, "trainer": trainer, "algorithm": {"proximal": "behavior"}})
    backend = TorchBackend(
        model_dir=folder,
        reference_dir=folder,
        trainer=config.trainer,
        algorithm=config.algorithm,
        temperature=1.0,
        longest=LONGEST,
        total_steps=1000,
        device=resolve_device(config.run.device),
        dtype=torch.float32,
    )

    def step(groups: list[TrajectoryGroup]) -> float:
        items = [
            TrainItem(
                group=group,
                trainable=group.packed_loss_mask,
                age=-group.packed_policy_versions,
                fresh=group.packed_loss_mask,
                proximal_logprobs=None,
                ref_logprobs=None,
            )
            for group in groups
        ]
        found = backend.train(
            items, loss_tokens=sampled(groups), sequences=GROUPS * SIBLINGS, before_update=lambda: None
        )
        return found.sums["loss"]

    return step


def plain_step(folder: Path, *, padded: bool) -> Step:
    """What one writes first; the loss is PPO's clipped objective with GRPO's advantages."""
    device = resolve_device("auto")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def batches(sequences: list[Any]) -> list[list[Any]]:
        if not padded:
            return [[sequence] for sequence in sequences]
        longest = max(len(ids) for ids, *_ in sequences)
        size = max(1, MICRO_TOKENS // longest)
        return [sequences[i : i + size] for i in range(0, len(sequences), size)]

    def step(groups: list[TrajectoryGroup]) -> float:
        sequences = []
        for group in groups:
            rewards = torch.from_numpy(group.rewards)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            ends = np.cumsum(group.seqlens)
            for i, (end, length) in enumerate(zip(ends, group.seqlens, strict=True)):
                span = slice(end - length, end)
                sequences.append(
                    (
                        torch.from_numpy(group.packed_input_ids[span].astype(np.int64)),
                        torch.from_numpy(group.packed_loss_mask[span]),
                        torch.from_numpy(group.packed_behavior_logprobs[span]),
                        advantages[i],
                    )
                )
        total, count = 0.0, sampled(groups)
        optimizer.zero_grad()
        for batch in batches(sequences):
            width = max(len(ids) for ids, *_ in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            attention, mask = torch.zeros(len(batch), width), torch.zeros(len(batch), width, dtype=torch.bool)
            old = torch.zeros(len(batch), width)
            for row, (tokens, chosen, behavior, _) in enumerate(batch):
                n = len(tokens)
                ids[row, :n], attention[row, :n], mask[row, :n], old[row, :n] = tokens, 1, chosen, behavior
            ids, attention, mask, old = (t.to(device) for t in (ids, attention, mask, old))
            hidden = model.model(ids, attention_mask=attention, use_cache=False).last_hidden_state
            keep = mask[:, 1:]
            logits = model.lm_head(hidden[:, :-1][keep])
            logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:][keep][:, None])[:, 0]
            weights = torch.stack([a for *_, a in batch]).to(device)[:, None].expand_as(keep)[keep]
            ratio = (logprobs - old[:, 1:][keep]).exp()
            loss = -torch.min(ratio * weights, ratio.clamp(0.8, 1.28) * weights).sum() / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return total

    return step


def measure(name: str, model: dict[str, Any], *, rounds: int, console: Console) -> list[dict[str, Any]]:
    """Rows of one model."""
    config = from_dict({"model": model})
    folder = ensure_checkpoint(config)
    vocabulary = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    contenders = {
        "streamrl": streamrl_step(folder, model=model, share_prefix=True),
        "streamrl, separate": streamrl_step(folder, model=model, share_prefix=False),
        "padded": plain_step(folder, padded=True),
        "unpadded": plain_step(folder, padded=False),
    }
    rates: dict[str, list[float]] = {contender: [] for contender in contenders}
    for round_ in range(rounds + 1):
        groups = make_groups(vocabulary, seed=round_)
        losses = {}
        for contender, step in contenders.items():
            began = time.perf_counter()
            losses[contender] = step(groups)
            if round_:  # the first warms up
                rates[contender].append(sampled(groups) / (time.perf_counter() - began))
        if max(losses.values()) - min(losses.values()) > TOLERANCE:
            raise SystemExit(f"the contenders do not compute the same loss: {losses}")
        console.print(f"{name}: round {round_} of {rounds} done", style="dim")
    plain = median(rates["padded"])
    return [
        {
            "model": name,
            "contender": contender,
            "tokens_per_second": round(median(found), 1),
            "ratio_to_padded": round(median(found) / plain, 2),
            "rounds": [round(rate, 1) for rate in found],
        }
        for contender, found in rates.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model only, two rounds")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    logging.disable_progress_bar()
    compute_with(options.threads)
    console = Console()
    rounds = 2 if options.quick else 3
    rows: list[dict[str, Any]] = []
    for name in list(MODELS)[: 1 if options.quick else None]:
        rows += measure(name, MODELS[name], rounds=rounds, console=console)
    table = Table(title="sampled tokens trained on per second")
    for column in ("model", "contender", "tokens/s", "ratio to padded"):
        table.add_column(column, justify="left" if column in ("model", "contender") else "right")
    for row in rows:
        figures = (f"{row['tokens_per_second']:.0f}", f"{row['ratio_to_padded']:.2f}")
        table.add_row(row["model"], row["contender"], *figures)
    console.print(table)
    settings = {
        "threads": options.threads,
        "rounds": rounds,
        "groups": GROUPS,
        "siblings": SIBLINGS,
        "prompt_tokens": PROMPT,
        "response_tokens": {"mean": MEAN, "sigma": SIGMA, "longest": LONGEST},
        "microbatch_tokens": MICRO_TOKENS,
    }
    console.print(f"written to {write_results('bench_trainer', settings, rows)}")


if __name__ == "__main__":
    main()
