"""What the capacity planner computes: properties of it, and the memory that backends really take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamrl.config import LoraConfig
from streamrl.errors import ConfigError, ModelError
from streamrl.planner.capacity import (
    ONLY_POLICY,
    Machine,
    Roles,
    Sizes,
    Workload,
    as_json,
    backend_of,
    capacity_plan,
    check_layout,
    server_memory,
    trained_per_second,
    trainer_memory,
    update_traffic,
)
from streamrl.planner.shapes import KNOWN, Shape, shape_of
from streamrl.trainer.backends.base import ModelSpec, ParallelModel
from streamrl.trainer.backends.torch import TorchModel
from streamrl.trainer.layout import Layout
from streamrl.trainer.packing import MicroBatch
from tests.trainer.backends.common import tensor_bytes
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world

SHAPES = st.sampled_from(sorted(KNOWN)).map(lambda name: KNOWN[name])
POWERS = st.sampled_from([1, 2, 4, 8])
LARGE = Machine(gpus=2**20, gpu_memory_gib=80.0)


@st.composite
def layouts(draw: st.DrawFn, shape: Shape) -> Layout:
    """One that the shape can be cut into."""
    layout = Layout(
        data=draw(POWERS),
        tensor=draw(st.sampled_from([size for size in (1, 2, 4, 8) if not shape.kv_heads % size])),
        pipeline=draw(st.sampled_from([size for size in (1, 2, 4, 8) if not shape.layers % size])),
        context=draw(POWERS),
        expert=draw(POWERS) if shape.experts else 1,
    )
    if layout.data * layout.context * layout.tensor % layout.expert:
        layout = msgspec.structs.replace(layout, expert=1)
    check_layout(shape, layout, gpus_per_host=8)
    return layout


SHAPES_AND_LAYOUTS = SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), layouts(shape)))


@given(SHAPES_AND_LAYOUTS, st.integers(1, 2**17))
def test_all_ranks_together_hold_every_weight_with_its_optimizer(drawn: tuple[Shape, Layout], tokens: int) -> None:
    """A rank is the fullest one, so their sum is at least the model, and with no pipeline exactly it."""
    shape, layout = drawn
    memory = trainer_memory(shape, layout, tokens=tokens)
    each = 16 if backend_of(layout) == "torch" else 12
    whole = each * shape.parameters
    held = memory.state if backend_of(layout) == "torch" else memory.optimizer
    assert held * layout.world >= whole * (1 - 1e-9)
    if layout.pipeline == 1:
        assert held * layout.world == pytest.approx(whole)


@given(SHAPES_AND_LAYOUTS, st.integers(1, 2**16))
def test_more_ranks_never_need_more_memory_each(drawn: tuple[Shape, Layout], tokens: int) -> None:
    shape, layout = drawn
    memory = trainer_memory(shape, layout, tokens=tokens)
    for name in ("data", "context"):
        wider = msgspec.structs.replace(layout, **{name: 2 * getattr(layout, name)})
        spread = trainer_memory(shape, wider, tokens=tokens)
        assert spread.state <= memory.state
        assert spread.activations <= memory.activations
    longer = trainer_memory(shape, layout, tokens=2 * tokens)
    assert longer.activations == pytest.approx(2 * memory.activations)
    assert longer.state == memory.state


@given(SHAPES, POWERS, st.integers(1, 64))
def test_weight_updates_carry_every_weight_to_every_server(shape: Shape, tensor: int, gservers: int) -> None:
    update = update_traffic(shape, LARGE, gservers=gservers)
    assert update.weights == 2 * shape.parameters == update.per_link
    assert update.seconds >= update.weights / (LARGE.host_gbit_s / 8 * 1e9)
    memory = server_memory(shape, LARGE, tensor=tensor)
    assert memory.weights * tensor == pytest.approx(2 * shape.parameters)
    assert memory.kv_token * tensor >= 2 * shape.kv_numbers  # heads are never fewer than the model has


@given(
    SHAPES,
    st.sampled_from([2, 3, 8, 16, 24, 64]),
    st.sampled_from([24.0, 80.0, 141.0]),
    st.sampled_from([1024, 16384, 131072]),
)
def test_a_plan_fits_and_a_refusal_says_what_is_missing(shape: Shape, gpus: int, memory: float, context: int) -> None:
    machine, job = Machine(gpus=gpus, gpu_memory_gib=memory), Workload(context=context, mean_context=context // 4)
    try:
        plan = capacity_plan(shape, machine, job)
    except ConfigError as refusal:
        with pytest.raises(ConfigError, match=r"lacks \d+\.\d GiB"):
            raise refusal from None
        return
    best = plan.divisions[0]
    for one in plan.divisions:
        assert one.lacking == 0
        assert one.layout.world + one.gservers * one.server_tensor <= gpus
        assert one.trainer.total <= machine.usable
        assert one.server.kv_tokens >= context
        assert one.tokens_per_second <= best.tokens_per_second / 0.98
    assert f"{len(plan.divisions)} fit" in plan.reason
    told = json.loads(as_json(plan))
    assert told["divisions"][0]["trainer"]["total"] == pytest.approx(best.trainer.total)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"tensor_parallel": 3}, ConfigError, "heads = 64 is no multiple of tensor = 3"),
        ({"pipeline_parallel": 7}, ConfigError, "layers = 80 is no multiple of pipeline = 7"),
        ({"expert_parallel": 2}, ConfigError, "it has no experts"),
        ({"gserver_tensor": 16}, ModelError, "does not fit on a host of 8"),
        ({"gservers": 70}, ConfigError, "no division of 64 GPUs"),
        ({"data_parallel": 64}, ConfigError, "no division of 64 GPUs"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, int], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        capacity_plan(KNOWN["Llama-3-70B"], Machine(gpus=64), Workload(), Sizes(**given))


@given(SHAPES_AND_LAYOUTS, st.booleans(), st.booleans(), st.integers(0, 64))
def test_roles_take_memory_and_time_of_their_own(
    drawn: tuple[Shape, Layout], critic: bool, reference: bool, rank: int
) -> None:
    shape, layout = drawn
    roles = Roles(critic=critic, reference=reference, lora_rank=rank if backend_of(layout) == "torch" else 0)
    alone, memory = (trainer_memory(shape, layout, tokens=4096, roles=each) for each in (ONLY_POLICY, roles))
    assert (memory.critic > 0) == critic
    assert (memory.reference > 0) == (reference and not roles.lora_rank)
    if roles.lora_rank:
        frozen = 2 * shape.parameters / layout.world
        adapter = shape.adapter(roles.lora_rank) / layout.world
        assert memory.weights == pytest.approx(frozen + 4 * adapter)
        assert memory.optimizer == pytest.approx(8 * adapter)
        if not critic:
            assert memory.total - 14 * adapter < alone.total
    else:
        assert memory.total == pytest.approx(alone.total + memory.critic + memory.reference)
    critics = shape.parameters - (0 if shape.tied else shape.embedding)  # but for its head
    if critic and backend_of(layout) == "torch":
        assert memory.critic * layout.world == pytest.approx(12 * critics)
    rates = [trained_per_second(shape, LARGE, gpus=8, mean_context=1, roles=each) for each in (ONLY_POLICY, roles)]
    slower = 5 - bool(roles.lora_rank) + 5 * critic + reference
    assert rates[0] / rates[1] == pytest.approx(slower / 5)


@pytest.mark.parametrize(("measured", "within"), [(30_460, 0.03), (34_140, 0.15)])
def test_training_is_as_fast_as_it_was_on_a_gpu(measured: float, within: float) -> None:
    """Tokens a second of both backends on an H200, whose peak is the planner's, in rows of 2048 (docs/scale.md):
    forward, again, and backward."""
    shape = KNOWN["Llama-3.2-1B"]
    planned = trained_per_second(shape, Machine(gpus=1), gpus=1, mean_context=2048)
    assert planned == pytest.approx(measured * 4 / ONLY_POLICY.passes, rel=within)


# --- against what is really allocated ------------------------------------------------------------

WORLD = 2
TOKENS = 32
MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}


def _micro_batch() -> MicroBatch:
    generator, places = np.random.default_rng(0), np.arange(TOKENS)
    ids, none = generator.integers(0, 512, (1, TOKENS)), np.zeros(TOKENS - 1, np.int64)
    return MicroBatch(
        input_ids=ids,
        position_ids=places[None],
        visible_until=np.full((1, TOKENS), TOKENS),
        row_index=none,
        column_index=places[:-1],
        group_index=none,
        target_index=places[:-1],
        target_ids=ids[0, 1:],
    )


def _spec(folder: Path, *, shard: bool, **changes: Any) -> ModelSpec:
    settings = {"head": "tokens", "dtype": torch.bfloat16, "lr": 1e-3, "gradient_checkpointing": True, **changes}
    return ModelSpec(folder=folder, device=torch.device("cpu"), shard=shard, **settings)


def _after_a_step(model: ParallelModel) -> None:
    micro = _micro_batch()
    model.accumulate([micro], lambda _, output: output.values.mean())
    model.update(lambda: None)
    model.accumulate([micro], lambda _, output: output.values.mean())


RANK = 4
ADAPTED = {"lora": LoraConfig(rank=RANK)}


def _torch_takes_what_was_said(rank: int, folder: Path) -> None:
    shape = shape_of(str(folder))
    for shard in (False, True):
        before = tensor_bytes()
        model = TorchModel(_spec(folder, shard=shard), world=WORLD)
        _after_a_step(model)
        gradients = [parameter.grad for parameter in model._parameters.values()]  # seen by the collector from here on
        said = trainer_memory(shape, Layout(data=WORLD), tokens=TOKENS, shard=shard)
        assert tensor_bytes() - before == pytest.approx(said.state, rel=0.03), shard
        if shard:
            _keeps_no_copies(model)
        del gradients, model
        roles = Roles(critic=True, reference=True)
        said = trainer_memory(shape, Layout(data=WORLD), tokens=TOKENS, shard=shard, roles=roles)
        adapted = trainer_memory(shape, Layout(data=WORLD), tokens=TOKENS, shard=shard, roles=Roles(lora_rank=RANK))
        for changes, expected in (
            ({"head": "scalar"}, said.critic),
            ({"lr": None}, said.reference),
            (ADAPTED, adapted.weights + adapted.optimizer),
        ):
            before = tensor_bytes()
            model = TorchModel(_spec(folder, shard=shard, **changes), world=WORLD)
            if "lr" not in changes:
                _after_a_step(model)
                model.update(lambda: None)  # gradients are gone
            assert tensor_bytes() - before == pytest.approx(expected, rel=0.03), (shard, changes)
            del model


def _keeps_no_copies(model: TorchModel) -> None:
    """A sharded layer is given back when it has computed; autocast's cache would keep what it was cast to."""
    kept: list[bool] = []
    last = model._net.model.base_model.layers[-1]
    hook = last.register_forward_hook(lambda *_: kept.append(torch.is_autocast_cache_enabled()))
    model.infer([_micro_batch()])
    hook.remove()
    assert kept == [False]


def _megatron_takes_what_was_said(rank: int, folder: Path) -> None:
    from streamrl.trainer.backends.megatron.model import MegatronModel

    before = tensor_bytes()
    model = MegatronModel(
        _spec(folder, shard=True), layout=Layout(tensor=WORLD), rank=rank, timeout_seconds=TIMEOUT_SECONDS
    )
    _after_a_step(model)
    said = trainer_memory(shape_of(str(folder)), Layout(tensor=WORLD), tokens=TOKENS)
    assert tensor_bytes() - before == pytest.approx(said.state, rel=0.05)


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_weights_gradients_and_optimizer_take_what_was_said(tmp_path: Path, backend: str) -> None:
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(tmp_path)
    run_world(WORLD, _torch_takes_what_was_said if backend == "torch" else _megatron_takes_what_was_said, tmp_path)
