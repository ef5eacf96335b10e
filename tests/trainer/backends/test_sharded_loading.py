"""Each rank makes and reads its own share of a model, and never more than a layer besides; what it gets is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamrl.checksum import tensor_sums
from streamrl.errors import ModelError
from streamrl.safetensors_files import write_file
from streamrl.trainer.layout import Layout
from tests.trainer.backends.memory import peak_memory
from tests.trainer.backends.reference import SCALAR, make_spec, save_models
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world

pytest.importorskip("megatron.core")

MIB = 2**20
LARGE = {
    "vocab_size": 16_000,
    "hidden_size": 640,
    "intermediate_size": 2_560,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""46 million numbers: 183 MB, of which a layer has 24 MB and the embedding 41 MB."""
SLACK = 24 * MIB
"""What else a process may need meanwhile: buffers, modules without weights, what the allocator keeps."""


def save_large(folder: Path) -> int:
    """A checkpoint of `LARGE` with random weights; its size in bytes."""
    config = Qwen3Config(**LARGE, tie_word_embeddings=True, dtype="float32", architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = [(name, tuple(p.shape)) for name, p in Qwen3ForCausalLM(config).named_parameters()]
    generator = torch.Generator().manual_seed(0)
    file = folder / "model.safetensors"
    write_file(
        file, [(n, torch.float32, s) for n, s in shapes], (torch.rand(s, generator=generator) for _, s in shapes)
    )
    return file.stat().st_size


def _make(kind: str, spec, rank: int, layout: Layout):
    if kind == "torch":
        from streamrl.trainer.backends.torch import TorchModel

        return TorchModel(spec, world=layout.data)
    from streamrl.trainer.backends.megatron.model import MegatronModel

    return MegatronModel(spec, layout=layout, rank=rank, timeout_seconds=TIMEOUT_SECONDS)


LAYOUTS = {"torch": Layout(data=4), "megatron": Layout(tensor=2, pipeline=2)}


def _load(rank: int, kind: str, models: Path, size: int) -> None:
    """Weights alone, in the numbers of the file."""
    layout = LAYOUTS[kind]
    _make(kind, make_spec(models / "llama", lr=None), rank, layout).close()  # imports, threads
    share = size / layout.world
    if kind == "megatron":  # a tied embedding is on both ends of the pipeline
        share += 4 * LARGE["vocab_size"] * LARGE["hidden_size"] / layout.tensor / layout.pipeline
    with peak_memory() as peak:
        model = _make(kind, make_spec(models / "large", lr=None, shard=True), rank, layout)
    told = f"{kind}, rank {rank}: {peak.bytes / MIB:.0f} MiB for a share of {share / MIB:.0f}"
    assert share / 2 < peak.bytes < share + SLACK, told
    found = {name: tensor_sums(weight) for name, weight in model.gather_weights() if weight.numel()}
    if rank == 0:
        weights = load_file(models / "large" / "model.safetensors")
        assert found == {name: tensor_sums(weight) for name, weight in weights.items()}
    model.close()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_rank_needs_memory_for_its_share_alone(tmp_path: Path, kind: str) -> None:
    save_models(tmp_path)
    run_world(4, _load, kind, tmp_path, save_large(tmp_path / "large"))


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_what_a_checkpoint_lacks_is_named_with_its_file(tmp_path: Path, backend: str) -> None:
    save_models(tmp_path)
    file = tmp_path / "llama" / "model.safetensors"
    weights = load_file(file)
    wrong = "model.layers.1.mlp.up_proj.weight"
    weights[wrong] = weights[wrong][:-1].clone()
    del weights["lm_head.weight"]
    save_file(weights, file)
    run_world(1, _is_refused, backend, tmp_path / "llama", ["lm_head.weight is missing", f"{file.name}: {wrong} has"])
    run_world(1, _starts_at_zero, backend, tmp_path / "qwen3")


def _is_refused(rank: int, backend: str, folder: Path, problems: list[str]) -> None:
    with pytest.raises(ModelError) as raised:
        _make(backend, make_spec(folder), rank, Layout())
    assert str(folder) in str(raised.value)
    for problem in problems:
        assert problem in str(raised.value)


def _starts_at_zero(rank: int, backend: str, folder: Path) -> None:
    """A critic begins as the policy's body, with a head that says nothing yet; but a scalar model has its own head."""
    model = _make(backend, make_spec(folder, head="scalar"), rank, Layout())
    found = dict(model.gather_weights())
    assert not found.pop("score.weight").any()
    wanted = load_file(folder / "model.safetensors")
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.items())
    model.close()
    model = _make(backend, make_spec(folder.parent / SCALAR, head="scalar"), rank, Layout())
    assert dict(model.gather_weights())["score.weight"].any()
    model.close()
