"""Tiny random models and groups for the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from streamrl.export import copy_settings
from streamrl.types import NO_VERSION, TrajectoryGroup

VOCAB = 48
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
KINDS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama_tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8)),
}


def save_model(folder: Path, kind: str = "llama_tied", *, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    KINDS[kind]().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    """One word for each token."""
    vocabulary = {f"t{i}": i for i in range(VOCAB)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary))).save_pretrained(folder)


def save_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], *, source: Path, scalar_head: bool) -> None:
    """A checkpoint like `source` with other weights."""
    folder.mkdir(exist_ok=True)
    copy_settings(source, folder, scalar_head=scalar_head)
    found = {name: weight.detach().clone().contiguous() for name, weight in weights}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def random_group(
    seq: int,
    rng: np.random.Generator,
    *,
    siblings: int = 4,
    prompt: int = 5,
    longest: int = 9,
    gaps: bool = False,
    versions: tuple[int, int] = (0, 1),
) -> TrajectoryGroup:
    """A group with responses of 1 to `longest` tokens; with `gaps`, some are feedback tokens."""
    shared = rng.integers(0, VOCAB, prompt)
    lengths = rng.integers(1, longest + 1, siblings)
    ids = [np.concatenate([shared, rng.integers(0, VOCAB, n)]) for n in lengths]
    masks = []
    for n in lengths:
        mask = np.concatenate([np.zeros(prompt, bool), np.ones(n, bool)])
        if gaps and n > 3:
            mask[prompt + 1 : prompt + 3] = False
        masks.append(mask)
    return group_of(seq, rng, ids, masks, prompt=prompt, versions=versions)


def branching_group(
    seq: int, rng: np.random.Generator, *, prompt: int = 5, turn: int = 6, versions: tuple[int, int] = (0, 1)
) -> TrajectoryGroup:
    """A group like an agent's: a call of one turn, and four of three turns; of these, pairs have two turns in common.

    Turns are sampled, but for their last two tokens. Of several trajectories that share a token each has it in its
    loss.
    """

    def grown(path: np.ndarray) -> np.ndarray:
        return np.concatenate([path, rng.integers(0, VOCAB, turn)])

    one = grown(rng.integers(0, VOCAB, prompt))
    ids = [one, *(grown(two) for two in (grown(one), grown(one)) for _ in range(2))]
    depth = [np.arange(len(path)) - prompt for path in ids]
    masks = [(d >= 0) & (d % turn < turn - 2) for d in depth]
    order = rng.permutation(len(ids))
    return group_of(seq, rng, [ids[i] for i in order], [masks[i] for i in order], prompt=prompt, versions=versions)


def group_of(
    seq: int,
    rng: np.random.Generator,
    ids: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    *,
    prompt: int,
    versions: tuple[int, int] = (0, 1),
) -> TrajectoryGroup:
    """A group of trajectories with token ids and loss masks `[tokens]`, and the rest at random."""
    mask = np.concatenate(masks)
    return TrajectoryGroup(
        seq=seq,
        worker="rollout/0",
        prompt_length=prompt,
        seqlens=np.array([len(path) for path in ids], np.int32),
        rewards=rng.random(len(ids)).astype(np.float32),
        packed_input_ids=np.concatenate(ids).astype(np.int32),
        packed_loss_mask=mask,
        packed_behavior_logprobs=np.where(mask, -rng.random(len(mask)) * 4, 0).astype(np.float32),
        packed_policy_versions=np.where(mask, rng.integers(*versions, len(mask)), NO_VERSION).astype(np.int32),
        finish_reasons=["stop"] * len(ids),
    )
