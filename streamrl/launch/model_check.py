"""`streamrl check --model`: whether trainer and embedded engine compute a model as transformers does.

Each part runs on the CPU in float32, by default with a small random copy of the architecture: narrow, with one layer of
each type. The reference is transformers' own model, one sequence at a time. Invariant: a part that fails becomes one
result, and the other parts run all the same.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from streamrl.causal_models import load_config, on_meta, random_model, small_config, weight_views
from streamrl.config import OptimizerConfig, TrainerConfig
from streamrl.errors import StreamRLError
from streamrl.export import copy_settings
from streamrl.gserver.embedded.engine import EmbeddedEngine
from streamrl.gserver.embedded.general import batching_problem
from streamrl.gserver.embedded.model import Unsupported, read_architecture
from streamrl.gserver.server.engine import Job, Output, Text
from streamrl.models import check_checkpoint, load_tokenizer
from streamrl.rollout.agents.rendering import TemplateRenderer
from streamrl.rollout.chat import ChatTokenizer
from streamrl.safetensors_files import bytes_of_parts, write_bytes
from streamrl.trainer.backends.base import ModelSpec
from streamrl.trainer.backends.probe import packing_problem
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.roles.items import infer_packed, pack_for
from streamrl.transport.generation import SamplingParams
from streamrl.types import NO_VERSION, TrajectoryGroup

TOLERANCE = 1e-4
"""Largest difference between log-probabilities."""
STEPS = 3
BATCH = TrainerConfig(max_tokens_per_microbatch=64)
OPTIMIZER = OptimizerConfig(grad_clip=1e9, weight_decay=0.0)
"""Gradients are never clipped."""
SEED = 0

Verdict = Literal["pass", "falls back", "fails"]


class Result(NamedTuple):
    """The result of one part of the check."""

    part: str
    verdict: Verdict
    why: str = ""


class _FallsBack(Exception):
    """The part works, but not the fastest way; the text names the reason."""


class _Differs(Exception):
    """Two numbers that must be equal are not."""


def check_model(folder: Path, *, full: bool = False) -> list[Result]:
    """Return the results for the model in `folder`; with `full` its own weights are used instead of a small copy."""
    results: list[Result] = []
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="streamrl-check-") as scratch:
        home = Path(scratch)
        subject = folder
        if not _part(results, "configuration", lambda: _make_config(folder)):
            return results
        if not full:
            subject = home / "small"
            if not _part(results, "small copy", lambda: _save_small_copy(folder, subject)):
                return results
        trained = _TrainingResult(subject, home / "trained")
        _part(results, "packed rows", lambda: _fall_back(packing_problem(subject)))
        if _part(results, "log-probabilities", trained.compare_logprobs):
            _part(results, "gradients", trained.compare_gradients)
            if _part(results, "save and reload", trained.save_and_reload):
                _part(results, "generation and update", lambda: asyncio.run(_generate(subject, trained)))
        _part(results, "chat template", lambda: _check_template(folder))
    return results


def _part(results: list[Result], name: str, check: Callable[[], None]) -> bool:
    """Append the result of `check`; return whether the part works."""
    try:
        check()
    except _FallsBack as reason:
        results.append(Result(name, "falls back", str(reason)))
    except (StreamRLError, _Differs) as error:
        results.append(Result(name, "fails", str(error)))
    except Exception as error:  # tolerance point: code of any model, which this check is there to try
        results.append(Result(name, "fails", f"{type(error).__name__}: {error}"))
    else:
        results.append(Result(name, "pass"))
    return results[-1].verdict != "fails"


def _fall_back(reason: str | None) -> None:
    if reason is not None:
        raise _FallsBack(reason)


def _make_config(folder: Path) -> None:
    check_checkpoint(folder)
    load_config(folder)


def _save_small_copy(folder: Path, target: Path) -> None:
    random_model(small_config(load_config(folder)), seed=SEED).save_pretrained(target)
    for file in folder.glob("*token*"):
        (target / file.name).write_bytes(file.read_bytes())


def _within(tolerance: float, found: Tensor, wanted: Tensor, *, of: str) -> None:
    worst = float((found - wanted).abs().max())
    if not worst <= tolerance:
        raise _Differs(f"{of} differ by {worst:.2g}, more than {tolerance:g}")


class _Reference:
    """transformers' own model in float32, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()

    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """Return the log-probability of each token of `ids` but the first."""
        tokens = torch.tensor([list(ids)])
        every = self.model(input_ids=tokens, use_cache=False).logits[0].float().log_softmax(-1)
        logprobs: Tensor = every[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        return logprobs

    def of_group(self, group: TrajectoryGroup) -> Tensor:
        """Return the log-probabilities of the sampled tokens of `group`."""
        found = []
        for end, length in zip(np.cumsum(group.seqlens), group.seqlens, strict=True):
            own = self.logprobs(group.packed_input_ids[end - length : end].tolist())
            found.append(torch.cat((torch.zeros(1), own)))
        return torch.cat(found)[torch.from_numpy(group.packed_loss_mask)]


class _TrainingResult:
    """The torch backend's model, and groups to compare and train it with."""

    def __init__(self, folder: Path, saved: Path) -> None:
        self.folder = folder
        self.saved = saved
        """Folder for the trained weights."""

    @cached_property
    def model(self) -> TorchModel:
        """The model, which is loaded at the first use."""
        spec = ModelSpec(
            folder=self.folder,
            head="tokens",
            device=torch.device("cpu"),
            dtype=torch.float32,
            lr=1e-3,
            optimizer=OPTIMIZER,
            total_updates=STEPS,
        )
        return TorchModel(spec)

    def groups(self, seed: int) -> list[TrajectoryGroup]:
        """Return two groups of trajectories that share a prompt, with random tokens."""
        vocabulary = int(load_config(self.folder).get_text_config().vocab_size)
        generator = np.random.default_rng(seed)
        return [_random_group(seq, vocabulary, generator) for seq in range(2)]

    def compare(self, reference: _Reference, tolerance: float) -> None:
        """Raise `_Differs` unless the log-probabilities equal the reference's."""
        groups = self.groups(SEED)
        outputs = infer_packed(self.model, groups, BATCH)
        assert outputs is not None
        with torch.no_grad():
            for group, output in zip(groups, outputs, strict=True):
                found = torch.from_numpy(output[group.packed_loss_mask])
                _within(tolerance, found, reference.of_group(group), of="log-probabilities")

    def compare_logprobs(self) -> None:
        self.compare(_Reference(self.folder), TOLERANCE)

    def compare_gradients(self) -> None:
        """Compare each weight's gradient of the summed log-probabilities, before any training step."""
        reference = _Reference(self.folder)
        groups = self.groups(SEED)
        torch.stack([reference.of_group(group).sum() for group in groups]).sum().backward()  # type: ignore[no-untyped-call]
        parameters = dict(reference.model.named_parameters())
        views = weight_views(on_meta(reference.model.config, dtype=torch.float32))
        self.train(groups)
        moments = {part.name: part.values for part in self.model.optimizer_parts()}
        largest = max(float(p.grad.abs().max()) for p in parameters.values() if p.grad is not None)
        for name, view in views.items():
            parameter = parameters.get(view.parameter)
            if parameter is not None and parameter.grad is not None:
                found = moments[f"exp_avg/{name}"] / (1 - OPTIMIZER.betas[0])  # the first moment after one step
                _within(TOLERANCE, found / largest, view.of(parameter.grad) / largest, of=f"gradients of {name}")

    def train(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Take one optimizer step on the sum of the log-probabilities."""
        self.model.accumulate(pack_for(self.model, groups, BATCH), lambda _, output: output.values.sum())
        self.model.update(lambda: None)

    def save_and_reload(self) -> None:
        """Train, save, and compare transformers' model of the saved weights with the trained one."""
        for step in range(1, STEPS):
            self.train(self.groups(step))
        self.saved.mkdir()
        copy_settings(self.folder, self.saved)
        write_bytes(self.saved / "model.safetensors", bytes_of_parts(self.model.weight_parts()))
        self.compare(_Reference(self.saved), TOLERANCE)


def _random_group(seq: int, vocabulary: int, generator: np.random.Generator) -> TrajectoryGroup:
    prompt = generator.integers(0, vocabulary, 6)
    lengths = generator.integers(6, 15, 3)
    ids = np.concatenate([np.concatenate((prompt, generator.integers(0, vocabulary, n))) for n in lengths])
    mask = np.concatenate([np.arange(len(prompt) + n) >= len(prompt) for n in lengths])
    return TrajectoryGroup(
        seq=seq,
        worker="check",
        prompt_length=len(prompt),
        seqlens=(lengths + len(prompt)).astype(np.int32),
        rewards=np.zeros(len(lengths), np.float32),
        packed_input_ids=ids.astype(np.int32),
        packed_loss_mask=mask,
        packed_behavior_logprobs=np.zeros(len(ids), np.float32),
        packed_policy_versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
        finish_reasons=["stop"] * len(lengths),
    )


async def _generate(folder: Path, trained: _TrainingResult) -> None:
    """Compare the engine's log-probabilities with transformers' before and after an update to the trained weights."""
    engine = EmbeddedEngine(
        folder=folder,
        text=Text(trained.folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        threads=torch.get_num_threads(),
        max_running=4,
        max_queued=4,
        max_context=64,
        seed=SEED,
        update_timeout=60.0,
    )
    prompts = [group.packed_input_ids[: group.prompt_length].tolist() for group in trained.groups(SEED)]
    await engine.start()
    try:
        await _compare_engine(engine, prompts, _Reference(folder), of="log-probabilities of the engine")
        await engine.load(trained.saved, "1")
        reference = _Reference(trained.saved)
        await _compare_engine(engine, prompts, reference, of="log-probabilities of the engine after an update")
    finally:
        await engine.close()
    try:
        read_architecture(folder)
    except Unsupported:
        _fall_back(batching_problem(folder))


async def _compare_engine(engine: Any, prompts: Sequence[list[int]], reference: _Reference, *, of: str) -> None:
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    tickets = [engine.submit(Job(rid=str(i), input_ids=prompt, params=params)) for i, prompt in enumerate(prompts)]
    for prompt, ticket in zip(prompts, tickets, strict=True):
        output: Output = await ticket.result()
        with torch.no_grad():
            wanted = reference.logprobs([*prompt, *output.output_ids])[len(prompt) - 1 :]
        _within(TOLERANCE, torch.tensor(output.logprobs), wanted, of=of)


def _check_template(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template:
        raise _FallsBack("the tokenizer has no chat template; set model.chat_template")
    renderer = TemplateRenderer(ChatTokenizer(tokenizer))
    if not renderer.stable:
        raise _FallsBack(f"the chat template changes: {renderer.stability}")
