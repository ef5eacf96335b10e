"""What every `ParallelModel` has to do, checked against the reference on every rank of a world."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streamrl.errors import ModelError, TrainingError
from streamrl.safetensors_files import TensorFiles, bytes_of_parts, file_name, write_bytes
from streamrl.trainer.backends import optimizer
from streamrl.trainer.backends.base import ModelSpec, ParallelModel
from streamrl.trainer.layout import Layout
from streamrl.trainer.packing import pack
from streamrl.types import TrajectoryGroup
from tests.trainer.backends.reference import (
    OPTIMIZER,
    SCALAR,
    TEMPERATURE,
    Reference,
    loss_of,
    make_groups,
    make_spec,
    micro_batches,
)
from tests.trainer.models import branching_group

MakeModel = Callable[[ModelSpec, Layout], ParallelModel]
"""Of this rank."""


def tensor_bytes() -> int:
    """Memory under all tensors of this process."""
    gc.collect()
    storages = {
        thing.untyped_storage()._cdata: thing.untyped_storage().nbytes()
        for thing in gc.get_objects()
        if isinstance(thing, Tensor) and not isinstance(thing, DTensor)
    }
    return sum(storages.values())


class Largest(TorchDispatchMode):
    """While it is entered, notes the largest tensor that an operation gives."""

    numbers = 0
    """Elements of its memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [
            tensor.untyped_storage().nbytes() // tensor.element_size()
            for tensor in tree_leaves(found)
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor)
        ]
        self.numbers = max(self.numbers, *sizes, 0)
        return found


class Checks:
    """The checks of one rank; all ranks of the world make the same calls."""

    def __init__(
        self, make_model: MakeModel, *, models: Path, scratch: Path, layout: Layout, rank: int, barrier: Any
    ) -> None:
        """`scratch`: an empty folder that all ranks see."""
        self._make = make_model
        self._models = models
        self._scratch = scratch
        self._layout = layout
        self._rank = rank
        self._data = layout.coordinates(rank).data
        self._barrier = barrier

    def all(self, kinds: Sequence[str], *, sharded: int, again: bool = False) -> None:
        """Everything, for `kinds`; every second model shards its optimizer, beginning with number `sharded`. `again`:
        it was done for the other half of the models, and what is the same whatever `sharded` is need not be repeated.
        """
        alive = self._make(make_spec(self._models / "odd", lr=None), self._layout)  # models share a process
        for number, kind in enumerate(kinds):
            self.model_equals_reference(kind, shard=number % 2 == sharded)
        self.nan_changes_nothing(shard=bool(sharded))
        self.nothing_to_learn(shard=bool(sharded))
        self.recomputation_changes_nothing(shard=not sharded)
        if not again:
            self.weights_are_checked()
            self.long_rows_make_nothing_large()
            for shard in (False, True):
                self.offloaded_models_come_back(shard=shard)
                self.bfloat16_is_near(shard=shard)
        self._outputs_equal(alive, Reference(self._models / "odd"), share_prefix=True)
        alive.close()

    def shared_rows(self, kinds: Sequence[str], *, shard: bool) -> None:
        """What ranks that share rows might do otherwise than ranks that have rows of their own."""
        for kind in kinds:
            self.model_equals_reference(kind, shard=shard)
        self.nothing_to_learn(shard=shard)
        self.long_rows_make_nothing_large()
        self.bfloat16_is_near(shard=shard)

    def model_equals_reference(self, kind: str, *, shard: bool) -> None:
        """Outputs, gradients, and three steps."""
        head = "scalar" if kind == SCALAR else "tokens"
        model = self._make(make_spec(self._models / kind, head=head, shard=shard), self._layout)
        reference = Reference(self._models / kind)
        self._weights_equal(model, reference, tolerance=0.0)
        for share_prefix in (True, False):
            self._outputs_equal(model, reference, share_prefix=share_prefix)
        self._outputs_equal(model, reference, share_prefix=True, temperature=1.0)
        for step in range(3):
            groups = make_groups(step, count=3 if step < 2 else 1)  # in the end some ranks have nothing at all
            lr_scale = 0.25 if step == 1 else 1.0
            wanted = reference.step(groups, lr_scale=lr_scale)
            update = self.step(model, groups, lr_scale=lr_scale)
            assert update.grad_norm == pytest.approx(wanted.norm, rel=1e-5), kind
            assert update.lr == pytest.approx(wanted.lr)
            if step == 0:
                self._gradients_equal(model, wanted.gradients, wanted.norm)
        assert wanted.norm > OPTIMIZER.grad_clip
        self._weights_equal(model, reference, tolerance=1e-5)
        self._outputs_equal(model, reference, share_prefix=True)
        self._weights_gathered_beside_accumulation(model)
        model.close()

    def step(self, model: ParallelModel, groups: Sequence[TrajectoryGroup], *, lr_scale: float = 1.0) -> Any:
        """An update by `groups`, in two calls of accumulate."""
        called = []
        for part in (groups[:2], groups[2:]):
            self.accumulate(model, part)
        update = model.update(lambda: called.append(True), lr_scale=lr_scale)
        assert called == [True]
        return update

    def accumulate(self, model: ParallelModel, groups: Sequence[TrajectoryGroup]) -> None:
        own = groups[self._data :: self._layout.data]
        micros = micro_batches(own)
        model.accumulate(micros, loss_of(own, micros))

    def nan_changes_nothing(self, *, shard: bool) -> None:
        """A loss that is no number on one rank stops all of them, and the next step is as if it had not been."""
        model = self._make(make_spec(self._models / "qwen3", shard=shard), self._layout)
        reference = Reference(self._models / "qwen3")
        groups = make_groups()
        own = groups[self._data :: self._layout.data]
        micros = micro_batches(own)
        last = min(self._layout.data, len(groups)) - 1  # of the ranks that have something
        poison = math.nan if self._data == last else 1.0
        model.accumulate(micros, lambda _, output: output.values.sum() * poison)
        called: list[bool] = []
        with pytest.raises(TrainingError, match="nan"):
            model.update(lambda: called.append(True))
        assert not called
        self._weights_equal(model, reference, tolerance=0.0)
        groups = make_groups(1)
        wanted = reference.step(groups)
        assert self.step(model, groups).grad_norm == pytest.approx(wanted.norm, rel=1e-5)
        self._weights_equal(model, reference, tolerance=1e-5)
        model.close()

    def weights_are_checked(self) -> None:
        """Weights of another model of the same shape are taken over; others are refused."""
        model = self._make(make_spec(self._models / "llama"), self._layout)
        other = Reference(self._models / "llama")
        other.disturb()
        model.load_weights(list(other.weights().items()))
        self._weights_equal(model, other, tolerance=0.0)
        self._outputs_equal(model, other, share_prefix=True)
        weights = other.weights()
        with pytest.raises(ModelError, match="missing"):
            model.load_weights([item for item in weights.items() if "layers.1.mlp.up" not in item[0]])
        with pytest.raises(ModelError, match="unheard"):
            model.load_weights({**weights, "unheard": torch.zeros(1)}.items())
        with pytest.raises(ModelError, match="shape"):
            model.load_weights({**weights, "model.norm.weight": torch.zeros(3)}.items())
        model.close()

    def nothing_to_learn(self, *, shard: bool) -> None:
        """A micro-batch that predicts nothing, and a loss of nothing, hold nobody up."""
        model = self._make(make_spec(self._models / "odd", shard=shard), self._layout)
        none = np.zeros(0, dtype=np.int64)
        fields = ("row_index", "column_index", "group_index", "target_index", "target_ids")
        micros = [
            msgspec.structs.replace(micro, **dict.fromkeys(fields, none)) for micro in micro_batches(make_groups())
        ]
        outputs = model.infer(micros)
        assert outputs is None or [(o.values.shape, o.entropy.shape) for o in outputs] == [((0,), (0,))] * len(micros)
        model.accumulate(micros, lambda _, output: output.values.sum())
        model.accumulate(micro_batches(make_groups()), lambda _, output: output.values[:0].sum())
        assert model.update(lambda: None).grad_norm == 0
        model.close()

    def offloaded_models_come_back(self, *, shard: bool) -> None:
        """Their memory is free meanwhile, and nobody can use them; then they go on bit for bit as if never away."""
        spec = make_spec(self._models / "qwen3", shard=shard)
        stays = self._make(spec, self._layout)
        self.step(stays, make_groups())
        before = tensor_bytes()
        goes = self._make(spec, self._layout)
        self.step(goes, make_groups())
        size = tensor_bytes() - before
        numbers = sum(math.prod(shape) for _, shape in goes.weight_specs())
        assert size > 3 * 4 * numbers / self._layout.world  # weights and two moments
        goes.offload()
        goes.offload()
        assert tensor_bytes() - before < size / 100
        for use in (lambda: goes.infer(micro_batches(make_groups())), lambda: next(iter(goes.gather_weights()))):
            with pytest.raises(TrainingError, match="offloaded"):
                use()
        goes.onload()
        assert tensor_bytes() - before > 0.95 * size
        self._bits_equal(goes, stays)
        for model in (stays, goes):
            self.step(model, make_groups(1))
        self._bits_equal(goes, stays)
        for model in (goes, stays):
            model.close()

    def _bits_equal(self, model: ParallelModel, other: ParallelModel) -> None:
        """Weights and optimizer of two models."""
        for ours, others in (
            (model.weight_parts(), other.weight_parts()),
            (model.optimizer_parts(), other.optimizer_parts()),
        ):
            for part, wanted in zip(ours, others, strict=True):
                assert part[:3] == wanted[:3]
                assert torch.equal(part.values, wanted.values), part.name

    def recomputation_changes_nothing(self, *, shard: bool) -> None:
        """Gradient checkpointing gives the same step."""
        spec = make_spec(self._models / "llama_tied", shard=shard, gradient_checkpointing=True)
        model = self._make(spec, self._layout)
        reference = Reference(self._models / "llama_tied")
        reference.step(make_groups())
        self.step(model, make_groups())
        self._weights_equal(model, reference, tolerance=1e-5)
        model.close()

    def long_rows_make_nothing_large(self, kind: str = "llama") -> None:
        """A long row with branches gives the numbers of the reference, and no tensor of the size length × length."""
        model = self._make(make_spec(self._models / kind, gradient_checkpointing=True), self._layout)
        reference = Reference(self._models / kind)
        group = branching_group(0, np.random.default_rng(0), prompt=150, turn=60)
        micros = pack([group], max_tokens=4096, share_prefix=True) if self._data == 0 else []
        with Largest() as largest:
            model.accumulate(micros, loss_of([group], micros))
        wanted = reference.step([group])
        assert model.update(lambda: None).grad_norm == pytest.approx(wanted.norm, rel=1e-5)
        self._weights_equal(model, reference, tolerance=1e-5)
        if micros:
            assert micros[0].branched
            assert largest.numbers < micros[0].tokens ** 2 / 2
        model.close()

    def bfloat16_is_near(self, *, shard: bool) -> None:
        """Computation in bfloat16, on float32 weights that lose nothing."""
        spec = make_spec(self._models / "qwen2", dtype=torch.bfloat16, shard=shard)
        model = self._make(spec, self._layout)
        reference = Reference(self._models / "qwen2")
        self._weights_equal(model, reference, tolerance=0.0)
        self._outputs_equal(model, reference, share_prefix=True, tolerance=0.3, at_least=1e-4)
        reference.step(make_groups())
        self.step(model, make_groups())
        self._weights_equal(model, reference, tolerance=4e-3)
        model.close()

    def state_moves_to(self, layout: Layout, *, shard: bool, other_shard: bool, kind: str = "qwen3") -> None:
        """Weights and state saved under one layout go on under another as if nothing had been."""
        first = self._make(make_spec(self._models / kind, shard=shard), self._layout)
        reference = Reference(self._models / kind)
        for step in range(2):
            reference.step(make_groups(step))
            self.step(first, make_groups(step))
        weights = self._broadcast_weights(first, reference)
        self._save_state(first)
        there = Checks(
            self._make,
            models=self._models,
            scratch=self._scratch,
            layout=layout,
            rank=self._rank,
            barrier=self._barrier,
        )
        second = self._make(make_spec(self._models / kind, shard=other_shard), layout)
        second.load_weights(weights.items())
        second.load_state(self._scratch)
        for step in range(2, 4):
            wanted = reference.step(make_groups(step))
            for checks, model in ((self, first), (there, second)):
                update = checks.step(model, make_groups(step))
                assert update.grad_norm == pytest.approx(wanted.norm, rel=1e-4)
                assert update.lr == pytest.approx(wanted.lr)
        self._weights_equal(first, reference, tolerance=1e-5)
        there._weights_equal(second, reference, tolerance=1e-5)
        # both live on in this world, each on its own groups
        self._outputs_equal(first, reference, share_prefix=True)
        there._outputs_equal(second, reference, share_prefix=False)
        other = self._make(make_spec(self._models / "llama"), layout)
        with pytest.raises(ModelError):
            other.load_state(self._scratch)
        for model in (other, second, first):
            model.close()

    def _save_state(self, model: ParallelModel) -> None:
        """What a checkpoint has of it: a file of each rank, and facts."""
        file = self._scratch / file_name(optimizer.OPTIMIZER, self._rank, self._layout.world)
        write_bytes(file, bytes_of_parts(model.optimizer_parts()))
        if self._rank == 0:
            for name, content in optimizer.updates_file(model.updates).items():
                (self._scratch / name).write_bytes(content)
        self._barrier()

    def _broadcast_weights(self, model: ParallelModel, reference: Reference) -> dict[str, Tensor]:
        """The whole weights of `model`, on all ranks, through a file."""
        gathered = dict(model.gather_weights())
        path = self._scratch / "weights.npz"
        if self._rank == 0:
            np.savez(path, **{name: tensor.numpy() for name, tensor in gathered.items()})
        self._barrier()
        with np.load(path) as file:
            return {name: torch.from_numpy(file[name]) for name in reference.weights()}

    def _outputs_equal(
        self,
        model: ParallelModel,
        reference: Reference,
        *,
        share_prefix: bool,
        tolerance: float = 1e-5,
        at_least: float = 0.0,
        temperature: float | None = None,
    ) -> None:
        groups = make_groups(7)[self._data :: self._layout.data]
        micros = micro_batches(groups, share_prefix=share_prefix)
        outputs = model.infer(micros, temperature=temperature)
        if not model.gives_output:
            assert outputs is None
            return
        assert outputs is not None
        assert len(outputs) == len(micros)
        wanted = [reference.predicted(group, temperature=temperature or TEMPERATURE) for group in groups]
        found = 0
        worst = 0.0
        for micro, output in zip(micros, outputs, strict=True):
            assert not output.values.requires_grad
            for i, (g, t) in enumerate(zip(micro.group_index, micro.target_index, strict=True)):
                worst = max(worst, abs(float(output.values[i] - wanted[g][0][t])))
                worst = max(worst, abs(float(output.entropy[i] - wanted[g][1][t])))
                found += 1
        assert found == sum(int(group.packed_loss_mask.sum()) for group in groups)
        assert worst <= tolerance
        assert worst >= at_least or not groups

    def _weights_equal(self, model: ParallelModel, reference: Reference, *, tolerance: float) -> None:
        wanted = reference.weights()
        assert model.weight_specs() == [(name, tuple(weight.shape)) for name, weight in wanted.items()]
        names = []
        for name, weight in model.gather_weights():
            names.append(name)
            if self._rank:
                assert weight.numel() == 0
                continue
            assert weight.dtype == torch.float32
            assert float((weight - wanted[name]).abs().max()) <= tolerance, name
        assert names == list(wanted)

    def _gradients_equal(self, model: ParallelModel, wanted: dict[str, Tensor], norm: float) -> None:
        """After the first step AdamW's first moment is the clipped gradient, times 1 - beta."""
        folder = self._scratch
        self._save_state(model)
        if self._rank == 0:
            found = TensorFiles(folder, optimizer.OPTIMIZER)
            settings = OPTIMIZER
            scale = min(1.0, settings.grad_clip / (norm + 1e-6)) * (1 - settings.betas[0])
            largest = max(float(gradient.abs().max()) for gradient in wanted.values())
            for name, gradient in wanted.items():
                difference = (found.read(f"exp_avg/{name}") / scale - gradient).abs().max()
                # Float32 sums go in an order of the processor's: 1.2e-6 with AVX-512, below 1e-6 with AVX2.
                assert float(difference) < 2e-6 * largest, (name, float(difference), largest)
            assert len(list(found.names())) == 2 * len(wanted)
            assert model.updates == 1
        self._barrier()

    def _weights_gathered_beside_accumulation(self, model: ParallelModel) -> None:
        before = dict(model.gather_weights())
        gathered: dict[str, Tensor] = {}

        def gather() -> None:
            for name, weight in model.gather_weights():
                gathered[name] = weight.clone()

        thread = threading.Thread(target=gather)
        thread.start()
        self.accumulate(model, make_groups(5))
        thread.join(60)
        assert not thread.is_alive()
        assert list(gathered) == list(before)
        assert all(torch.equal(gathered[name], before[name]) for name in before)
