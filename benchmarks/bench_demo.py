"""Seconds to a mean reward of 0.9 on the same two cores: the demo against a plain loop.

    python benchmarks/bench_demo.py [--quick] [--repeats N]

The plain loop is a first attempt: one process, both cores for everything, generate a
batch, score it, one padded forward and backward pass, update, again. It decodes with streamrl's own
model code (the fastest here), and shares the task, the reward, the batch (8 × 8), the learning
rate, the objective and the initial weights with examples/smollm2_addition.toml. The demo is started
as a user would start it, and runs to its own end; once as it is, once with a core for each pool, as it was before
its trainer, the slower of the two, might use both. All are timed from the moment at which the model is loaded, to the
step after which the mean is reached.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import EXAMPLES, Row, parser_of, report, run_example

from streamrl.config import Config, load

EXAMPLE = EXAMPLES / "smollm2_addition.toml"
TARGET, WINDOW = 0.9, 5
A_CORE_EACH = {"trainer.threads": 1, "gserver.max_running": 32}
MOST_STEPS, QUICK_STEPS = 60, 2


def main() -> None:
    parser = parser_of(__doc__, quick=f"{QUICK_STEPS} steps of each, far from the target")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each, in turn, with different seeds")
    options = parser.parse_args()
    most = QUICK_STEPS if options.quick else MOST_STEPS
    rows: list[Row] = []
    for seed in range(options.repeats):
        for name, measure in (
            ("plain synchronous loop, 2 threads", plain_loop),
            ("streamrl demo", run_demo),
            ("with a core for each pool", partial(run_demo, **A_CORE_EACH)),
        ):
            print(f"{name}, seed {seed} …", flush=True)
            rows.append({"system": name, "seed": seed, **measure(seed, most)})
            print(rows[-1], flush=True)
    plain, ours = (
        median(row["seconds_to_target"] for row in rows if row["system"].startswith(kind))
        for kind in ("plain", "streamrl")
    )
    settings = {
        "example": EXAMPLE.name,
        "target": TARGET,
        "window": WINDOW,
        "most_steps": most,
        "quick": options.quick,
        "ratio": ours / plain,
    }
    report("bench_demo", settings, rows)


def run_demo(seed: int, most: int, **settings: Any) -> dict[str, Any]:
    """The example with other `settings`, cut after `most` steps where these are fewer than it needs."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"run.name": "demo", "run.dir": folder, "run.seed": seed, "run.total_train_steps": most}
        run_example(EXAMPLE, {**settings, **own})
        lines = (Path(folder) / "demo" / "metrics.jsonl").read_text().splitlines()
        summary = json.loads((Path(folder) / "demo" / "summary.json").read_text())
    steps = [json.loads(line)["metrics"] for line in lines]
    reached = first_reached([step["reward_mean"] for step in steps])
    last = len(steps) if reached is None else reached
    return {
        "seconds_to_target": round(steps[last - 1]["run_seconds"], 1),
        "reached": reached is not None,
        "steps": last,
        "overhead_share": summary["overhead_share"],
    }


def first_reached(rewards: Sequence[float]) -> int | None:
    """After how many steps the mean reward of `WINDOW` of them is the target."""
    for last in range(WINDOW, len(rewards) + 1):
        if sum(rewards[last - WINDOW : last]) / WINDOW >= TARGET:
            return last
    return None


def plain_loop(seed: int, most: int) -> dict[str, Any]:
    """`_plain_loop` in a fresh process, so that thread settings and memory are its own."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_plain_loop, args=(seed, most, sending))
    process.start()
    sending.close()
    result: dict[str, Any] = receiving.recv()
    process.join()
    return result


def _plain_loop(seed: int, most: int, answer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from streamrl.models import ensure_checkpoint, load_tokenizer
    from streamrl.rollout.reward.functions import Response
    from streamrl.rollout.tasks import addition, addition_reward
    from streamrl.types import Prompt

    torch.set_num_threads(2)
    torch.manual_seed(seed)
    config: Config = load(EXAMPLE)
    folder = ensure_checkpoint(config)
    tokenizer = load_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sampler = _Sampler(folder, config, seed)
    eos = tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.trainer.lr, betas=config.trainer.optimizer.betas, weight_decay=0.0, fused=True
    )
    groups, siblings = config.trainer.batch_groups, config.rollout.group_size
    rewards_of_steps: list[float] = []
    began = time.monotonic()
    for step in range(most):
        rows = [addition(step * groups + i, seed) for i in range(groups)]
        prompts = []
        for row in rows:
            chat = [{"role": "user", "content": row["prompt"]}]
            rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
            prompts += [list(rendered["input_ids"])] * siblings
        responses, behavior = sampler.generate(model, prompts, eos)
        rewards = torch.empty(groups, siblings)
        for i, response in enumerate(responses):
            row = rows[i // siblings]
            ended = response[-1] == eos
            text = tokenizer.decode(response, skip_special_tokens=True)
            prompt = Prompt(seq=0, index=0, epoch=0, messages=[], input_ids=[], answer=row["answer"], metadata={})
            scored = Response(text=text, finish_reason="stop" if ended else "length", output_tokens=len(response))
            rewards[i // siblings, i % siblings] = addition_reward(scored, prompt)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        length = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
        ids = torch.full((len(prompts), length), eos)
        mask, old = torch.zeros(len(prompts), length - 1), torch.zeros(len(prompts), length - 1)
        for i, (prompt_ids, response) in enumerate(zip(prompts, responses, strict=True)):
            ids[i, : len(prompt_ids) + len(response)] = torch.tensor(prompt_ids + response)
            span = slice(len(prompt_ids) - 1, len(prompt_ids) - 1 + len(response))
            mask[i, span], old[i, span] = 1.0, torch.tensor(behavior[i])
        # the plain loop, too, leaves out groups that teach nothing
        contrast = rewards.max(1).values != rewards.min(1).values
        keep = contrast.repeat_interleave(siblings)
        if bool(keep.any()):
            chosen = mask[keep].bool()
            hidden = model.model(ids[keep, :-1], use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[chosen])
            logprobs = logits.log_softmax(-1).gather(-1, ids[keep, 1:][chosen][:, None])[:, 0]
            weights = advantages.view(-1)[keep][:, None].expand_as(chosen)[chosen]
            ratio = (logprobs - old[keep][chosen]).exp()
            clipped = ratio.clamp(1 - config.algorithm.clip_low, 1 + config.algorithm.clip_high)
            loss = -torch.min(ratio * weights, clipped * weights).sum() / mask.sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.trainer.optimizer.grad_clip)
            optimizer.step()
        rewards_of_steps.append(float(rewards.mean()))
        if first_reached(rewards_of_steps) is not None:
            break
    seconds = round(time.monotonic() - began, 1)
    reached = first_reached(rewards_of_steps) is not None
    answer.send({"seconds_to_target": seconds, "reached": reached, "steps": step + 1})


class _Sampler:
    """Decodes a whole batch in lockstep with the embedded engine's forward pass."""

    def __init__(self, folder: Path, config: Config, seed: int) -> None:
        import torch

        from streamrl.gserver.embedded.model import KVCache, Model, read_architecture
        from streamrl.gserver.embedded.weights import Parameters

        device, dtype = torch.device("cpu"), torch.float32
        architecture = read_architecture(folder)
        slots = config.trainer.batch_groups * config.rollout.group_size
        self._cache = KVCache(architecture, max_slots=slots, max_length=128, dtype=dtype, device=device)
        self._parameters = Parameters(architecture, dtype=dtype, device=device)
        self._model = Model(self._parameters, self._cache, max_length=128)
        self._most = config.rollout.sampling.max_new_tokens
        self._seed = seed
        self._drawn = 0

    def generate(self, policy: Any, prompts: list[list[int]], eos: int) -> tuple[list[list[int]], list[list[float]]]:
        """A response to each prompt (neighbours that are equal share a prefill), and its log-probabilities."""
        import torch

        from streamrl.gserver.embedded.model import Extension
        from streamrl.gserver.embedded.request import Draw, sample

        with torch.inference_mode():
            self._parameters.update(dict(policy.named_parameters()))
            self._parameters.pack()
            self._cache.reserve(slots=len(prompts), length=max(map(len, prompts)) + self._most)
            first: dict[tuple[int, ...], int] = {}
            for slot, prompt in enumerate(prompts):
                first.setdefault(tuple(prompt), slot)
            extensions = sorted((Extension(s, 0, p) for p, s in first.items()), key=lambda e: len(e.tokens))
            hidden, starts = self._model.extend(extensions)
            ends = {e.slot: start + len(e.tokens) - 1 for e, start in zip(extensions, starts, strict=True)}
            for slot, prompt in enumerate(prompts):
                source = first[tuple(prompt)]
                if slot != source:
                    self._cache.copy(source, [slot], len(prompt))
            logits = self._model.logits(hidden[[ends[first[tuple(p)]] for p in prompts]])
            tokens: list[list[int]] = [[] for _ in prompts]
            logprobs: list[list[float]] = [[] for _ in prompts]
            draws = [Draw(seed=self._seed * 2**32 + self._drawn + i) for i in range(len(prompts))]
            self._drawn += len(prompts)
            for position in range(self._most):
                sampled = sample(logits, draws, [position] * len(prompts))
                for i, (token, logprob) in enumerate(zip(sampled.tokens, sampled.logprobs, strict=True)):
                    if not tokens[i] or tokens[i][-1] != eos:
                        tokens[i].append(token)
                        logprobs[i].append(logprob)
                if position + 1 == self._most or all(t[-1] == eos for t in tokens):
                    break
                logits = self._model.decode(sampled.tokens, [len(p) + position for p in prompts])
        return tokens, logprobs


if __name__ == "__main__":
    main()
