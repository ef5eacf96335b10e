"""The contenders of `bench_trainer.py`. Megatron Core and TRL are imported where they are used."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from training_batch import (
    BETAS,
    CLIP_HIGH,
    CLIP_LOW,
    GRAD_CLIP,
    LONGEST,
    LR,
    MICRO_TOKENS,
    PROMPT,
    SIBLINGS,
    Contender,
    Found,
    advantages,
    calls_of,
    sampled,
)
from transformers import AutoModelForCausalLM

from streamrl.config import AlgorithmConfig, OptimizerConfig, TrainerConfig
from streamrl.device import resolve_device
from streamrl.models import load_tokenizer
from streamrl.trainer.algorithms.losses import KLCoefficient
from streamrl.trainer.backends.base import ModelSpec, ParallelModel, Ranks
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.layout import Layout
from streamrl.trainer.packing import pack
from streamrl.trainer.roles.actor import Actor
from streamrl.trainer.roles.items import Minibatch, StepStatistics, TrainItem
from streamrl.transport.collective import join_world, open_store
from streamrl.types import TrajectoryGroup

OPTIMIZER = OptimizerConfig(betas=BETAS, weight_decay=0.0, grad_clip=GRAD_CLIP)
TIMEOUT_SECONDS = 600.0


def model_spec(folder: Path) -> ModelSpec:
    """A policy in float32."""
    return ModelSpec(
        folder=folder,
        head="tokens",
        device=resolve_device("auto"),
        dtype=torch.float32,
        lr=LR,
        optimizer=OPTIMIZER,
        total_updates=1000,
    )


def torch_model(folder: Path) -> ParallelModel:
    return TorchModel(model_spec(folder))


def streamrl_contender(model: ParallelModel, *, share_prefix: bool, by_call: bool = False) -> Contender:
    """streamrl's policy over `model`, which several contenders may share; `by_call`: each call is a trajectory."""
    device = resolve_device("auto")
    actor = Actor(
        model,
        ranks=Ranks(Layout(), 0, device=device),
        trainer=TrainerConfig(
            dtype="float32",
            lr=LR,
            optimizer=OPTIMIZER,
            max_tokens_per_microbatch=MICRO_TOKENS,
            share_prefix=share_prefix,
        ),
        algorithm=AlgorithmConfig(proximal="behavior", behavior_kl_coef=0.0, clip_low=CLIP_LOW, clip_high=CLIP_HIGH),
        kl=KLCoefficient(0.0, target=None, horizon=1),
        longest=LONGEST,
        device=device,
    )

    def laid_out(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        return [calls_of(group) for group in groups] if by_call else groups

    def computed(groups: list[TrajectoryGroup]) -> int:
        batches = pack(laid_out(groups), max_tokens=MICRO_TOKENS, share_prefix=share_prefix)
        return sum(batch.tokens for batch in batches)

    def step(groups: list[TrajectoryGroup]) -> Found:
        groups = laid_out(groups)
        items = [
            TrainItem(
                group=group,
                trainable=group.packed_loss_mask,
                age=-group.packed_policy_versions,
                comparable=group.packed_loss_mask,
            )
            for group in groups
        ]
        minibatch = Minibatch(
            loss_tokens=sampled(groups), episodes=sum(int(group.episodes[-1]) + 1 for group in groups)
        )
        credits = actor.begin_step(items, policy_version=0, given=False)
        found = StepStatistics()
        actor.train_step(items, credits, minibatch, found, before_update=lambda: None)
        return Found(found.sums["loss"], found.maxima["grad_norm"])

    return Contender(step, computed)


@contextmanager
def megatron_model(folder: Path) -> Iterator[ParallelModel]:
    """Megatron Core in a world of one rank, while the context lasts."""
    from streamrl.trainer.backends.megatron.model import MegatronModel

    store = open_store("127.0.0.1")
    backend = "nccl" if resolve_device("auto").type == "cuda" else "gloo"
    join_world(
        address="127.0.0.1",
        port=store.port,
        rank=0,
        world_size=1,
        backend=backend,
        timeout=TIMEOUT_SECONDS,
        store=store,
    )
    try:
        model = MegatronModel(model_spec(folder), layout=Layout(), rank=0, timeout_seconds=TIMEOUT_SECONDS)
        yield model
        model.close()
    finally:
        dist.destroy_process_group()


class _Sequence(NamedTuple):
    """One response with its prompt; arrays of the shape `[tokens]`."""

    input_ids: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    advantage: Tensor


class PlainLoop:
    """A plain loop with transformers; the loss is PPO's clipped objective with GRPO's advantages."""

    def __init__(self, folder: Path) -> None:
        self._device = resolve_device("auto")
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

    @property
    def padded(self) -> Contender:
        """Micro-batches of sequences in the order of their arrival, padded to the longest of each."""
        return self._contender(_in_order)

    @property
    def unpadded(self) -> Contender:
        """One sequence after another."""
        return self._contender(lambda sequences: [[sequence] for sequence in sequences])

    def _contender(self, batches: Callable[[list[_Sequence]], list[list[_Sequence]]]) -> Contender:
        return Contender(
            lambda groups: self._step(batches(_sequences(groups)), sampled(groups)),
            lambda groups: sum(len(batch) * _longest(batch) for batch in batches(_sequences(groups))),
        )

    def _step(self, batches: list[list[_Sequence]], tokens: int) -> Found:
        total = 0.0
        self._optimizer.zero_grad()
        for batch in batches:
            loss = self._loss(batch) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), GRAD_CLIP)
        self._optimizer.step()
        return Found(total, float(norm))

    def _loss(self, batch: list[_Sequence]) -> Tensor:
        """Summed over tokens."""
        shape = (len(batch), _longest(batch))
        ids, attention = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
        mask, old = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
        for row, sequence in enumerate(batch):
            n = len(sequence.input_ids)
            ids[row, :n], attention[row, :n] = sequence.input_ids, 1
            mask[row, :n], old[row, :n] = sequence.loss_mask, sequence.behavior_logprobs
        ids, attention, mask, old = (t.to(self._device) for t in (ids, attention, mask, old))
        hidden = self._model.model(ids, attention_mask=attention, use_cache=False).last_hidden_state
        keep = mask[:, 1:]
        logits = self._model.lm_head(hidden[:, :-1][keep])
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:][keep][:, None])[:, 0]
        advantages = torch.stack([s.advantage for s in batch]).to(self._device)[:, None].expand_as(keep)[keep]
        ratio = (logprobs - old[:, 1:][keep]).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        summed: Tensor = -torch.min(ratio * advantages, clipped * advantages).sum()
        return summed


def _in_order(sequences: list[_Sequence]) -> list[list[_Sequence]]:
    size = max(1, MICRO_TOKENS // _longest(sequences))
    return [sequences[i : i + size] for i in range(0, len(sequences), size)]


def _longest(sequences: list[_Sequence]) -> int:
    return max(len(sequence.input_ids) for sequence in sequences)


def _sequences(groups: list[TrajectoryGroup]) -> list[_Sequence]:
    found = []
    for group in groups:
        ends = np.cumsum(group.seqlens)
        for end, length, advantage in zip(ends, group.seqlens, torch.from_numpy(advantages(group)), strict=True):
            span = slice(end - length, end)
            found.append(
                _Sequence(
                    torch.from_numpy(group.packed_input_ids[span].astype(np.int64)),
                    torch.from_numpy(group.packed_loss_mask[span]),
                    torch.from_numpy(group.packed_behavior_logprobs[span]),
                    advantage,
                )
            )
    return found


class TRLStep:
    """TRL's GRPOTrainer: its loss, backward pass and optimizer step on given completions.

    Its micro-batches have `sequences` sequences, which may change between steps. Prompts are padded on the left,
    completions on the right, each to the longest of the batch. A conversation of several turns is one row: all tokens
    after the first prompt are the completion, and those that the policy did not sample are masked (`tool_mask`).
    Written for TRL 1.16; it uses parts that are not public.
    """

    def __init__(self, folder: Path) -> None:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        self.sequences = SIBLINGS
        self._scratch = tempfile.TemporaryDirectory()
        arguments = GRPOConfig(
            output_dir=self._scratch.name,
            per_device_train_batch_size=SIBLINGS,
            num_generations=SIBLINGS,
            max_completion_length=LONGEST,
            loss_type="dapo",  # the mean over the tokens of the whole batch
            beta=0.0,
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            learning_rate=LR,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0,
            max_grad_norm=GRAD_CLIP,
            optim="adamw_torch_fused",
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
        )
        self._trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=_no_reward,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": ""}]),
            processing_class=load_tokenizer(folder),
        )
        self._trainer._prepare_inputs = lambda batch: batch  # it is given completions, and generates none
        self._trainer.create_optimizer()

    @property
    def contender(self) -> Contender:
        return Contender(self, _computed)

    def __call__(self, groups: list[TrajectoryGroup]) -> Found:
        """One optimizer step, as the loop of transformers' `Trainer` makes it."""
        from trl.trainer.utils import split_tensor_dict

        trainer, device = self._trainer, self._trainer.accelerator.device
        micros = len(groups) * SIBLINGS // self.sequences
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = micros
        batch = {name: tensor.to(device) for name, tensor in _generation_batch(groups).items()}
        total = 0.0
        for inputs in split_tensor_dict(batch, micros):
            total += float(trainer.training_step(trainer.model, inputs, batch["num_items_in_batch"]))
        norm = trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), GRAD_CLIP)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        return Found(total, float(norm))


def _generation_batch(groups: list[TrajectoryGroup]) -> dict[str, torch.Tensor]:
    """The results of `GRPOTrainer._generate_and_score_completions`: arrays of the shape `[sequences, longest]`."""
    ids, completions, masks, logprobs = [], [], [], []
    for group in groups:
        lengths = group.seqlens.tolist()
        for tokens, mask, behavior in zip(
            torch.from_numpy(group.packed_input_ids).long().split(lengths),
            torch.from_numpy(group.packed_loss_mask).long().split(lengths),
            torch.from_numpy(group.packed_behavior_logprobs).split(lengths),
            strict=True,
        ):
            ids.append(tokens[:PROMPT])
            completions.append(tokens[PROMPT:])
            masks.append(mask[PROMPT:])
            logprobs.append(behavior[PROMPT:])
    prompt_ids = torch.stack(ids)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": pad_sequence(completions, batch_first=True),
        "completion_mask": pad_sequence([torch.ones_like(tokens) for tokens in completions], batch_first=True),
        "tool_mask": pad_sequence(masks, batch_first=True, padding_value=1),
        "advantages": torch.cat([torch.from_numpy(advantages(group)) for group in groups]),
        "old_per_token_logps": pad_sequence(logprobs, batch_first=True),
        "num_items_in_batch": torch.tensor(sampled(groups)),
    }


def _computed(groups: list[TrajectoryGroup]) -> int:
    return sum(group.size for group in groups) * max(int(group.seqlens.max()) for group in groups)


def _no_reward(completions: list[Any], **_: Any) -> list[float]:
    raise AssertionError(f"{len(completions)} completions came to be scored, but rewards are given")
