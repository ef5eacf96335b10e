"""Suggestions of known keys for an unknown key. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import get_origin

import msgspec

from streamrl.config.fields import Section, section_of

MOST_SUGGESTED = 3
SAME_SECTION, OTHER_SECTION = 0.6, 0.8
"""Least similarity (`difflib`, 0 to 1) of the last words of two keys: within one section, and across sections."""

COMMON_NAMES = {
    "actor_lr": "trainer.lr",
    "learning_rate": "trainer.lr",
    "critic_lr": "critic.lr",
    "max_grad_norm": "trainer.optimizer.grad_clip",
    "gradient_clipping": "trainer.optimizer.grad_clip",
    "lr_schedule": "trainer.optimizer.schedule",
    "lr_scheduler": "trainer.optimizer.schedule",
    "lr_scheduler_type": "trainer.optimizer.schedule",
    "warmup": "trainer.optimizer.warmup_steps",
    "batch_size": "trainer.batch_groups",
    "global_batch_size": "trainer.batch_groups",
    "rollout_batch_size": "trainer.batch_groups",
    "train_batch_size": "trainer.batch_groups",
    "micro_batch_size": "trainer.max_tokens_per_microbatch",
    "gradient_accumulation_steps": "trainer.max_tokens_per_microbatch",
    "ppo_epochs": "algorithm.epochs",
    "num_iterations": "algorithm.epochs",
    "mini_batch_size": "algorithm.minibatches",
    "num_minibatches": "algorithm.minibatches",
    "beta": "algorithm.kl_coef",
    "kl_beta": "algorithm.kl_coef",
    "kl_loss_coef": "algorithm.kl_coef",
    "adv_estimator": "algorithm.advantage",
    "advantage_estimator": "algorithm.advantage",
    "lam": "algorithm.gae_lambda",
    "entropy_coeff": "algorithm.entropy_coef",
    "clip_eps": "algorithm.clip_low",
    "clip_ratio": "algorithm.clip_low",
    "cliprange": "algorithm.clip_low",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "cliprange_value": "critic.value_clip",
    "loss_agg_mode": "algorithm.loss_aggregation",
    "epochs": "run.total_train_epochs",
    "num_train_epochs": "run.total_train_epochs",
    "total_epochs": "run.total_train_epochs",
    "steps": "run.total_train_steps",
    "max_steps": "run.total_train_steps",
    "total_steps": "run.total_train_steps",
    "num_steps": "run.total_train_steps",
    "output_dir": "run.dir",
    "run_name": "run.name",
    "experiment_name": "run.name",
    "resume_from_checkpoint": "run.resume_from",
    "save_steps": "trainer.save_every",
    "save_freq": "trainer.save_every",
    "save_interval": "trainer.save_every",
    "save_total_limit": "trainer.keep_checkpoints",
    "eval_steps": "evaluation.every",
    "eval_interval": "evaluation.every",
    "test_freq": "evaluation.every",
    "bf16": "trainer.dtype",
    "precision": "trainer.dtype",
    "fsdp": "trainer.shard",
    "report_to": "metrics.sinks",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "r": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "n": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "n_samples_per_prompt": "rollout.group_size",
    "num_generations": "rollout.group_size",
    "num_return_sequences": "rollout.group_size",
    "max_tokens": "rollout.sampling.max_new_tokens",
    "max_response_length": "rollout.sampling.max_new_tokens",
    "max_completion_length": "rollout.sampling.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_data": "data.path",
    "dataset": "data.path",
    "train_files": "data.path",
    "max_model_len": "gserver.max_context",
    "context_length": "gserver.max_context",
    "max_num_seqs": "gserver.max_running",
    "max_off_policyness": "staleness.max_staleness",
    "max_head_offpolicyness": "staleness.max_staleness",
    "max_async_level": "staleness.max_staleness",
    "off_policy_steps": "staleness.max_staleness",
}
"""Names in other frameworks, by the last word of the key, and the equivalent key here."""


def suggestions(key: str, config: type[Section], *, siblings: Iterable[str]) -> list[str]:
    """Return known keys of `config` that the unknown `key` may stand for, the likeliest first; perhaps an empty list.

    First come the key in `COMMON_NAMES` for its last word, and keys of any section with the same last word; else the
    nearest of `siblings`, the keys of the same section; else the nearest last word of other sections. `key` and the
    results are dotted, as in `trainer.optimizer.grad_clip`.
    """
    section, dot, word = key.rpartition(".")
    last_words: dict[str, list[str]] = {}
    for name in sorted(_keys(config), key=lambda name: name.partition(".")[0] != key.partition(".")[0]):
        last_words.setdefault(name.rpartition(".")[2], []).append(name)
    common = [COMMON_NAMES[word]] if word in COMMON_NAMES else []
    if found := [*common, *(name for name in last_words.get(word, []) if name not in common)]:
        return found[:MOST_SUGGESTED]
    if near := get_close_matches(word, siblings, n=1, cutoff=SAME_SECTION):
        return [f"{section}{dot}{near[0]}"]
    near = get_close_matches(word, last_words, n=1, cutoff=OTHER_SECTION)
    return last_words[near[0]][:MOST_SUGGESTED] if near else []


def _keys(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield all keys and sections; for tables with free names (`trainer.roles.NAME`), only the table."""
    for field in msgspec.structs.fields(section):
        yield f"{prefix}{field.name}"
        nested = None if get_origin(field.type) is dict else section_of(field.type)
        if nested is not None:
            yield from _keys(nested, f"{prefix}{field.name}.")
