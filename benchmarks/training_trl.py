"""TRL's GRPOTrainer as a contender of `bench_trainer.py`: its loss, backward pass and optimizer step.

Generation and rewards are left out: the trainer is given the completions, in the form in which it
hands its own to its training step (prompts padded on the left, completions on the right, each to
the longest of the generation batch). A conversation of several turns is what TRL makes of one, by
tools or by a `rollout_func`: one row, in which everything after the first prompt is the completion,
and what the policy did not sample is masked (`tool_mask`). Written for TRL 1.16, parts of which it
reaches are not public.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from training_batch import (
    BETAS,
    CLIP_HIGH,
    CLIP_LOW,
    GRAD_CLIP,
    LONGEST,
    LR,
    PROMPT,
    SIBLINGS,
    Contender,
    Found,
    advantages,
    sampled,
)
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from streamrl.models import load_tokenizer
from streamrl.types import TrajectoryGroup


class _GivenCompletions(GRPOTrainer):  # type: ignore[misc]
    """Trains on what it is given."""

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        return generation_batch


class TRLStep:
    """One trainer, whose micro-batches have `sequences` sequences; that may change between steps."""

    def __init__(self, folder: Path) -> None:
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
        self._trainer = _GivenCompletions(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=_no_reward,
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": ""}]),
            processing_class=load_tokenizer(folder),
        )
        self._trainer.create_optimizer()

    @property
    def contender(self) -> Contender:
        return Contender(self, _computed)

    def __call__(self, groups: list[TrajectoryGroup]) -> Found:
        """One optimizer step, as the loop of transformers' `Trainer` makes it."""
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
    """What `GRPOTrainer._generate_and_score_completions` answers: arrays of `[sequences, longest]`."""
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
