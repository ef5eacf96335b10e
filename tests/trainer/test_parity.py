"""Stale training is the arithmetic that it is said to be: a run at η = 2, with tokens of several versions in a batch
and some that are too old, gives the weights that a plain loop gives on the same groups.

The run is a real master and a real worker's computation (packed, siblings sharing their prompt) in one process. The
loop is transformers and torch's AdamW in float32, one response at a time, written from the formulas in
docs/algorithms.md.
"""

from __future__ import annotations

import copy
import threading
from statistics import fmean

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from streamrl.config import from_dict
from streamrl.trainer.calls import CallDone, ClearDataCache
from streamrl.trainer.graph import graph_of
from streamrl.trainer.worker.assembly import Assembly
from streamrl.trainer.worker.computation import Computation
from streamrl.trainer.worker.data import WorkerData
from streamrl.types import NO_VERSION, TrajectoryGroup
from tests.trainer.models import VOCAB, save_model
from tests.trainer.pretended import Script, pretended, virtually

STALENESS, BATCH, MINIBATCHES, STEPS, SIBLINGS, PROMPT = 2, 4, 2, 6, 3, 4
LR, BETAS, WEIGHT_DECAY, GRAD_CLIP, WARMUP = 1e-2, (0.9, 0.95), 0.1, 0.05, 3
EPS = 1e-3  # a large one keeps AdamW from turning rounding noise of tiny gradients into whole steps
CONTRAST_KNOWN = 5
"""From so many steps on, a batch in which fewer groups teach than on average takes a smaller step."""
TEMPERATURE, CLIP_LOW, CLIP_HIGH, CAP, PULL, KL, ENTROPY = 0.7, 0.002, 0.003, 1.1, 0.2, 0.1, 0.01


def configured(folder):
    return from_dict(
        {
            "run": {"dir": str(folder), "name": "stale", "total_train_steps": STEPS, "device": "cpu"},
            "metrics": {"sinks": []},
            "rollout": {"group_size": SIBLINGS, "sampling": {"temperature": TEMPERATURE}},
            "staleness": {"max_staleness": STALENESS},
            "trainer": {
                "batch_groups": BATCH,
                "dtype": "float32",
                "lr": LR,
                "max_tokens_per_microbatch": 60,
                "optimizer": {
                    "betas": list(BETAS),
                    "eps": EPS,
                    "weight_decay": WEIGHT_DECAY,
                    "grad_clip": GRAD_CLIP,
                    "warmup_steps": WARMUP,
                },
            },
            "algorithm": {
                "minibatches": MINIBATCHES,
                "clip_low": CLIP_LOW,
                "clip_high": CLIP_HIGH,
                "behavior_weight_cap": CAP,
                "behavior_kl_coef": PULL,
                "kl_coef": KL,
                "entropy_coef": ENTROPY,
            },
        }
    )


class Written:
    """Groups as rollout workers write them, with sampled tokens of the versions that were served meanwhile."""

    def __init__(self, model):
        self.groups: dict[int, TrajectoryGroup] = {}
        self._model = model

    def __call__(self, seq, versions):
        rng = np.random.default_rng(seq)
        versions = np.array(versions, np.int32)
        lengths = rng.integers(1, len(versions) + 1, SIBLINGS)
        lengths[0] = len(versions)
        prompt = rng.integers(0, VOCAB, PROMPT)
        ids = np.concatenate([np.concatenate([prompt, rng.integers(0, VOCAB, n)]) for n in lengths])
        blank = np.full(PROMPT, NO_VERSION, np.int32)
        packed = np.concatenate([np.concatenate([blank, versions[:n]]) for n in lengths])
        self.groups[seq] = TrajectoryGroup(
            seq=seq,
            worker="rollout/0",
            prompt_length=PROMPT,
            seqlens=(PROMPT + lengths).astype(np.int32),
            rewards=rng.random(SIBLINGS).astype(np.float32) if seq % 5 else np.ones(SIBLINGS, np.float32),
            packed_input_ids=ids.astype(np.int32),
            packed_loss_mask=packed != NO_VERSION,
            packed_behavior_logprobs=np.zeros(len(ids), np.float32),
            packed_policy_versions=packed,
            finish_reasons=["stop"] * SIBLINGS,
        )
        with torch.no_grad():  # near to what a policy would have given
            noise = [0.5 * rng.normal(size=n) for n in lengths]
            found = [
                np.concatenate([np.zeros(PROMPT), logprobs_of(self._model, ids)[0].numpy() + drawn])
                for (ids, _, _), drawn in zip(responses(self.groups[seq]), noise, strict=True)
            ]
        self.groups[seq].packed_behavior_logprobs = np.concatenate(found).astype(np.float32)
        return self.groups[seq]


def responses(group):
    """Of each sibling: all token ids; behaviour log-probabilities and versions of its sampled tokens."""
    cuts = np.cumsum(group.seqlens)[:-1]
    parts = zip(
        np.split(group.packed_input_ids, cuts),
        np.split(group.packed_behavior_logprobs, cuts),
        np.split(group.packed_policy_versions, cuts),
        strict=True,
    )
    return [
        (torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(old[PROMPT:]), torch.from_numpy(versions[PROMPT:]))
        for ids, old, versions in parts
    ]


def logprobs_of(model, ids):
    """Of the tokens after the prompt: their log-probabilities, and the entropies of what they were drawn from."""
    logits = model(ids[None]).logits[0, PROMPT - 1 : -1] / TEMPERATURE
    distribution = torch.distributions.Categorical(logits=logits)
    return distribution.log_prob(ids[PROMPT:]), distribution.entropy()


class Loop:
    """The plain loop."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.reference = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
        )
        self.updates = 0
        self.clipped = self.capped = self.masked = self.far = 0
        """How often each of the formulas' corners was met."""
        self.teaching: list[float] = []
        """Of each step, the share of groups with different rewards."""
        self.lr_scale = 1.0

    def step(self, groups, *, version):
        with torch.no_grad():
            proximal = {g.seq: [logprobs_of(self.model, ids)[0] for ids, _, _ in responses(g)] for g in groups}
        share = sum(len(set(group.rewards.tolist())) > 1 for group in groups) / BATCH
        if len(self.teaching) >= CONTRAST_KNOWN:
            self.lr_scale = min(1.0, (share / fmean(self.teaching)) ** 0.5)
        self.teaching.append(share)
        size = BATCH // MINIBATCHES
        for start in range(0, BATCH, size):
            self._update(groups[start : start + size], proximal, version=version)

    def _update(self, groups, proximal, *, version):
        loss, tokens = torch.zeros(()), 0
        for group in groups:
            rewards = torch.from_numpy(group.rewards)
            spread = float(rewards.std())
            for sibling, (ids, behavior, versions) in enumerate(responses(group)):
                young = versions >= version - STALENESS
                advantage = (rewards[sibling] - rewards.mean()) / (spread + 1e-4) if spread else torch.zeros(())
                now, entropy = logprobs_of(self.model, ids)
                with torch.no_grad():
                    reference = logprobs_of(self.reference, ids)[0]
                old = proximal[group.seq][sibling]
                weight = torch.exp(old - behavior)
                ratio = torch.exp(now - old)
                bounded = torch.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
                policy = -torch.minimum(ratio * advantage, bounded * advantage)
                kl = torch.exp(reference - now) - 1 - (reference - now)
                moved = now - behavior
                pull = torch.where(moved < np.log(2), torch.exp(moved) - 1 - moved, moved + 1 - 2 * np.log(2))
                each = torch.clip(weight, max=CAP) * policy + KL * kl - ENTROPY * entropy
                each = each + PULL * pull * (versions < version)
                self.far += int((moved > np.log(2))[young].sum())
                loss = loss + each[young].sum()
                tokens += int(young.sum())
                self.masked += int((~young).sum())
                self.capped += int((weight > CAP)[young].sum())
                self.clipped += int((bounded * advantage < ratio * advantage)[young].sum())
        self.optimizer.zero_grad()
        (loss / tokens).backward()
        self.norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRAD_CLIP)
        self.optimizer.param_groups[0]["lr"] = self.lr_scale * LR * min(1.0, (self.updates + 1) / (WARMUP + 1))
        self.optimizer.step()
        self.updates += 1


def test_a_stale_run_gives_the_weights_of_a_plain_loop_on_the_same_groups(tmp_path):
    folder = save_model(tmp_path / "model")
    config = configured(tmp_path)
    loop = Loop(folder)
    written = Written(copy.deepcopy(loop.model))
    assembly = Assembly(config, roles=graph_of(config).roles, model_dir=folder, rank=0, device=torch.device("cpu"))

    async def train():
        script = Script(
            tokens=lambda seq: 12 if seq % 4 == 0 else 1 + seq % 3,
            group=written,
            slots=6,
            seconds=lambda name, count: 2.0 if name == "actor_train" else 0.0,
        )
        async with pretended(config, script) as run:
            free = threading.Event()
            free.set()
            data = WorkerData(run.workers.datasets[0], rank=0)
            computation = Computation(
                config, rank=0, graph=graph_of(config), assembly=assembly, data=data, weights_free=free
            )

            def compute(call):
                if isinstance(call, ClearDataCache):
                    data.discard(call.seqs, come_again=call.come_again)
                    return CallDone(0.0)
                return computation.carry_out(call)

            run.workers.compute = compute
            try:
                await run.master.run()
            finally:
                computation.close()
            return run.manager.reports

    reports = virtually(train())
    ages = {age for report in reports for age in report.token_ages}
    assert ages == {0, 1, 2}
    assert any(len(report.token_ages) > 1 for report in reports)
    for version, report in enumerate(reports):
        loop.step([written.groups[seq] for seq in report.seqs], version=version)
    assert sum(report.metrics["tokens_masked"] for report in reports) == loop.masked > 0
    assert min(loop.clipped, loop.capped, loop.far) > 5
    assert float(loop.norm) > GRAD_CLIP
    assert loop.lr_scale < 1

    weights = dict(assembly.actor.model.gather_weights())
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert max(float((weights[name] - before[name]).abs().max()) for name in weights) > 1e-2
    for name, expected in loop.model.named_parameters():
        torch.testing.assert_close(weights[name], expected.detach(), rtol=0, atol=1e-6, msg=name)
