"""Whatever is written and swapped, the model computes with the weights that are named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamrl.architecture import Architecture, Rope
from streamrl.checksum import checksums, tensor_sums, weights_checksum
from streamrl.gserver.embedded.model import Extension, KVCache, Model
from streamrl.gserver.embedded.weights import DoubleBufferedWeights, Parameters
from streamrl.safetensors_files import Copiers, layout, mapped

CPU = torch.device("cpu")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def architecture(*, tied: bool) -> Architecture:
    return Architecture(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope=Rope(theta=10000.0),
        max_position=64,
        tied=tied,
        qkv_bias=True,
        o_bias=False,
        qk_norm=True,
    )


def model_of(parameters: Parameters) -> Model:
    a = parameters.architecture
    cache = KVCache(a, max_slots=2, max_length=32, dtype=parameters.compute_dtype, device=CPU)
    return Model(parameters, cache, max_length=32)


@torch.inference_mode()
def logits(model: Model, *, count: int = len(TOKENS)) -> Tensor:
    hidden, _ = model.extend([Extension(slot=0, cached=0, tokens=TOKENS[:count])])
    return model.logits(hidden)


def fresh_logits(a: Architecture, weights: dict[str, Tensor], *, compute_dtype: torch.dtype, count: int) -> Tensor:
    parameters = Parameters(a, dtype=torch.bfloat16, device=CPU, compute_dtype=compute_dtype)
    parameters.update(weights)
    return logits(model_of(parameters), count=count)


def in_a_file(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Those of a file that nobody can find any more."""
    header, begins, size = layout([(name, tuple(tensor.shape)) for name, tensor in weights.items()], dtype)
    content = bytearray(size)
    content[: len(header)] = header
    for name, tensor in weights.items():
        data = tensor.to(dtype).contiguous().view(torch.uint8).flatten().numpy().tobytes()
        content[begins[name] : begins[name] + len(data)] = data
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        return mapped(Path(file.name))


def random_weight(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(torch.bfloat16).to(like.dtype)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    tied=st.booleans(),
    packs=st.booleans(),
    count=st.sampled_from([1, 3, 4, len(TOKENS)]),
)
def test_any_sequence_of_updates_and_swaps(
    data: st.DataObject, dtype: torch.dtype, tied: bool, packs: bool, count: int
) -> None:
    """Each set's weights are tracked by hand; the served one gives the logits of a fresh model with them.

    What was shared stays as it was.
    """
    a = architecture(tied=tied)
    buffers = DoubleBufferedWeights(a, dtype=dtype, compute_dtype=torch.float32, device=CPU, threads=1)
    names = sorted(buffers.served.named)
    copiers = Copiers()
    if not packs:
        buffers.served._packs = False
    model = model_of(buffers.served)
    live = {name: torch.zeros_like(tensor) for name, tensor in buffers.served.named.items()}
    zeros = aside = dict(live)
    for seed, step in enumerate(
        data.draw(st.lists(st.sampled_from(["store", "adopt", "ready", "swap", "compute"]), min_size=1, max_size=12))
    ):
        changed = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1)) if step == "store" else []
        if step == "store":
            if buffers._staged is not None and buffers._staged.read_only:  # it cannot be written to
                aside = zeros
            aside = aside | {name: random_weight(aside[name], seed) for name in changed}
            sums = copiers.each(buffers.store, [(name, aside[name]) for name in changed])
            assert checksums(sums) == {name: tensor_sums(aside[name].to(dtype)) for name in changed}
        elif step == "adopt":
            weights = {name: random_weight(tensor, seed) for name, tensor in aside.items()}
            if buffers.adopt(in_a_file(weights, dtype)):
                aside = weights
            else:
                assert dtype != torch.float32
        elif step == "ready":
            buffers.make_ready()
        elif step == "swap":
            model.parameters = buffers.swap()
            live, aside = aside, live
            if buffers._staged is None:  # an adopted set is freed
                aside = zeros
        assert torch.allclose(
            logits(model, count=count), fresh_logits(a, live, compute_dtype=torch.float32, count=count), atol=1e-4
        )
        assert buffers.served.checksum() == weights_checksum({n: t.to(dtype) for n, t in live.items()})
