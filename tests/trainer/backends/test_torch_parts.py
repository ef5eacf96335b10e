"""What a single process can show of the torch backend: an optimizer elsewhere, files in parts, learning rates."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.config import OptimizerConfig
from streamrl.safetensors_files import TensorBox, bytes_of_parts, file_name, write_bytes
from streamrl.trainer.backends.base import OffloadedMemory
from streamrl.trainer.backends.optimizer import OPTIMIZER, AdamW, learning_rate, updates_file
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.packing import pack
from streamrl.trainer.roles.items import unpack
from streamrl.types import TrajectoryGroup
from tests.trainer.backends.reference import loss_of, make_groups, make_spec, micro_batches
from tests.trainer.models import branching_group, group_of, random_group, save_model


def train(model, steps):
    for step in steps:
        groups = make_groups(step)
        micros = micro_batches(groups)
        model.accumulate(micros, loss_of(groups, micros))
        model.update(lambda: None)


def weights(model):
    return {name: weight.clone() for name, weight in model.gather_weights()}


def test_an_optimizer_kept_elsewhere_makes_the_same_steps(tmp_path):
    folder = save_model(tmp_path / "model", "qwen3")
    here, elsewhere = (TorchModel(make_spec(folder, offload_optimizer=kept)) for kept in (False, True))
    for model in (here, elsewhere):
        train(model, range(2))
        # weights from outside reach the optimizer's own copy too
        model.load_weights([(name, weight * 1.01) for name, weight in weights(model).items()])
        train(model, range(2, 4))
    expected = weights(here)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(elsewhere).items())
    for part, other in zip(here.optimizer_parts(), elsewhere.optimizer_parts(), strict=True):
        assert part[:3] == other[:3]
        assert torch.equal(part.values, other.values)


def _begun_alike(seq: int, rng: np.random.Generator, *, prompt: int) -> TrajectoryGroup:
    """A group whose prompt begins as others do; two of its responses are equal."""
    begun = [*range(10, 10 + prompt - 1), seq]
    responses = [[1, 2, 3], [1, 2, 3], [1, 4], [5]]
    paths = [np.array([*begun, *response]) for response in responses]
    return group_of(seq, rng, paths, [np.arange(len(path)) >= prompt for path in paths], prompt=prompt)


@pytest.mark.parametrize("longest", [30, 300])
def test_concatenated_trees_give_the_numbers_of_one_sequence_at_a_time(tmp_path, longest):
    """Of short paths, which are stacked, and of one that is too long; some groups share a template."""
    model = TorchModel(make_spec(save_model(tmp_path / "model", "qwen3")))
    rng = np.random.default_rng(0)
    groups = [random_group(i, rng, prompt=8 * i + 3, longest=longest if i == 2 else 30) for i in range(4)]
    groups.append(branching_group(4, rng))
    groups += [_begun_alike(seq, rng, prompt=9) for seq in (5, 6)]
    found = []
    for max_tokens, share_prefix in ((4096, True), (1, False)):
        micros = pack(groups, max_tokens=max_tokens, share_prefix=share_prefix)
        assert len(micros) == (1 if share_prefix else sum(group.size for group in groups))
        model.accumulate(micros, loss_of(groups, micros))
        gradients = {name: parameter.grad.clone() for name, parameter in model._parameters.items()}
        found.append((unpack(micros, model.infer(micros), groups), gradients, model.update(lambda: None).grad_norm))
        model.load_weights(weights(TorchModel(make_spec(tmp_path / "model"))).items())
    (together, gradients, norm), (alone, wanted, wanted_norm) = found
    for mine, theirs in zip(together, alone, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
    assert norm == pytest.approx(wanted_norm, rel=1e-5)


class CastWeights(TorchDispatchMode):
    """Counts the casts to bfloat16 of each of `weights` while it is entered."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.casts = dict.fromkeys((weight.data_ptr() for weight in weights), 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.casts:
            self.casts[args[0].data_ptr()] += 1
        return func(*args, **(kwargs or {}))


def test_a_weight_is_cast_once_for_all_micro_batches_of_a_step(tmp_path):
    model = TorchModel(make_spec(save_model(tmp_path / "model", "qwen3"), dtype=torch.bfloat16))
    groups = make_groups(0)
    micros = pack(groups, max_tokens=1, share_prefix=True)
    assert len(micros) > 2
    with CastWeights(model._parameters.values()) as counted:
        model.accumulate(micros, loss_of(groups, micros))
    assert max(counted.casts.values()) == 1
    together = {name: parameter.grad.clone() for name, parameter in model._parameters.items()}
    model._forget_gradients()
    for number, micro in enumerate(micros):
        model.accumulate([micro], lambda _, output, number=number: loss_of(groups, micros)(number, output))
    for name, parameter in model._parameters.items():
        assert torch.equal(parameter.grad, together[name]), name


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 5), st.integers(1, 30), st.floats(0.01, 1))
def test_learning_rates_are_those_of_torchs_schedulers(schedule, warmup, total, ratio):
    config = OptimizerConfig(schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    rest = max(1, total - warmup)
    main = {
        "constant": lambda: LinearLR(optimizer, start_factor=1.0, total_iters=rest),
        "linear": lambda: LinearLR(optimizer, start_factor=1.0, end_factor=ratio, total_iters=rest),
        "cosine": lambda: CosineAnnealingLR(optimizer, rest, eta_min=2.0 * ratio),
    }[schedule]()
    scheduler = main
    if warmup:
        rising = LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        scheduler = SequentialLR(optimizer, [rising, main], milestones=[warmup])
    for step in range(max(total, warmup)):
        found = learning_rate(step, peak=2.0, config=config, total_steps=total)
        assert found == pytest.approx(scheduler.get_last_lr()[0], rel=1e-6), step
        optimizer.step()
        scheduler.step()
    assert learning_rate(10_000, peak=2.0, config=config, total_steps=total) == pytest.approx(
        2.0 if schedule == "constant" else 2.0 * ratio
    )


class Alone:
    """Tensors that one rank has whole: what `Spread` is without other ranks."""

    def __init__(self, weights):
        self._weights = weights

    def specs(self):
        return [(name, tuple(weight.shape)) for name, weight in self._weights.items()]

    def parts(self, tensors):
        return [TensorBox.whole(name, tensor) for name, tensor in tensors.items()]

    own_parts = parts


@pytest.mark.parametrize("offload", [False, True])
def test_steps_are_those_of_a_loop_in_float64_and_go_on_from_files(tmp_path, offload):
    """AdamW by its formulas (Loshchilov and Hutter, 2019, algorithm 2), with a clipped gradient and two rates."""
    generator = torch.Generator().manual_seed(0)
    spec = make_spec(tmp_path, offload_optimizer=offload, lr=0.01, total_updates=40)
    begin = {
        "a": torch.randn(7, 5, generator=generator),
        "b": torch.randn(3, generator=generator),
        "none": torch.empty(0),
    }
    mine = {name: tensor.clone() for name, tensor in begin.items()}
    adam = AdamW(mine, spec)
    exact = {name: tensor.double() for name, tensor in begin.items()}
    first = {name: torch.zeros_like(tensor) for name, tensor in exact.items()}
    second = {name: torch.zeros_like(tensor) for name, tensor in exact.items()}
    (beta1, beta2), config = spec.optimizer.betas, spec.optimizer
    for step in range(40):
        if step == 20:  # another process goes on
            write_bytes(tmp_path / file_name(OPTIMIZER, 0, 1), bytes_of_parts(adam.parts(Alone(mine))))
            for name, content in updates_file(adam.updates).items():
                (tmp_path / name).write_bytes(content)
            adam = AdamW(mine, spec)
            adam.load(tmp_path, Alone(mine))
        gradients = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in begin.items()}
        scale, lr_scale = (0.5, 1.0) if step % 3 else (1.0, 0.25)
        lr = adam.step({name: g.clone() for name, g in gradients.items()}, scale=scale, lr_scale=lr_scale)
        assert lr == lr_scale * learning_rate(step, peak=0.01, config=config, total_steps=40)
        for name, weight in exact.items():
            gradient = scale * gradients[name].double()
            first[name] = beta1 * first[name] + (1 - beta1) * gradient
            second[name] = beta2 * second[name] + (1 - beta2) * gradient**2
            weight -= lr * config.weight_decay * weight
            corrected = (second[name] / (1 - beta2 ** (step + 1))).sqrt() + config.eps
            weight -= lr * first[name] / (1 - beta1 ** (step + 1)) / corrected
    for name, weight in exact.items():
        assert torch.allclose(mine[name].double(), weight, rtol=2e-6, atol=2e-6)
    assert adam.updates == 40


def test_offloaded_memory_is_free_and_views_come_back():
    whole = torch.arange(6.0)
    view = whole[2:4]
    other = torch.arange(3.0)
    offloaded = OffloadedMemory([whole, view, other])
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    offloaded.bring_back()
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    view += 10
    assert whole.tolist() == [0, 1, 12, 13, 4, 5]
    assert other.tolist() == [0, 1, 2]
