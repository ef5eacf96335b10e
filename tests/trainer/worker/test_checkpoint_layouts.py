"""Checkpoints of real models: what one layout wrote another one takes over bit for bit, whatever backends the two have;
nobody's memory holds more than its own part; `export` makes Hugging Face models of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from streamrl.config import Config, from_dict
from streamrl.records import progress
from streamrl.records.progress import Progress
from streamrl.safetensors_files import TensorFiles
from streamrl.trainer.worker.assembly import Assembly, resume
from streamrl.trainer.worker.checkpoint import CheckpointWriter, Together, take_snapshot
from tests.experts import as_in_files
from tests.trainer.backends.memory import peak_memory
from tests.trainer.backends.reference import EXPERTS, save_models
from tests.trainer.backends.test_sharded_loading import MIB, SLACK, save_large
from tests.trainer.backends.world import TIMEOUT_SECONDS, run_world

pytest.importorskip("megatron.core")

SHARDED = {"data_parallel": 4, "shard": True}
WHOLE = {"data_parallel": 4}
CRITIC = {"backend": "torch", "data_parallel": 4, "tensor_parallel": 1, "pipeline_parallel": 1}
MEGATRON = {"backend": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2, "roles": {"critic": CRITIC}}
SPREAD = {"backend": "megatron", "tensor_parallel": 2, "data_parallel": 2, "shard": True}
BFLOAT16 = {"backend": "megatron", "pipeline_parallel": 2, "data_parallel": 2, "shard": True, "dtype": "bfloat16"}
CONTEXT = {"backend": "megatron", "tensor_parallel": 2, "context_parallel": 2}
WAY = [SHARDED, MEGATRON, SPREAD, WHOLE, CONTEXT, BFLOAT16, SHARDED]
ALL_EXPERTS_APART = SPREAD | {"expert_parallel": 4}
EXPERTS_TWICE = {"backend": "megatron", "data_parallel": 4, "expert_parallel": 2}
WAYS = {"llama": WAY, "odd": WAY, EXPERTS: [SHARDED, ALL_EXPERTS_APART, WHOLE, EXPERTS_TWICE, SHARDED]}
"""Models and their layouts, each of which goes on from the checkpoint of the one before."""
STEMS = ("model", "critic/model", "state/actor/optimizer", "state/critic/optimizer")


class Worker:
    """What loads and saves on one rank."""

    def __init__(
        self, trainer: dict[str, Any], *, first: Path, saved: Path | None = None, rank: int, roles: Sequence[str]
    ) -> None:
        """Begins with the model in `first`, or goes on from the checkpoint `saved`."""
        run = {"device": "cpu"} | ({} if saved is None else {"resume_from": str(saved)})
        sections = {"algorithm": {"advantage": "gae"}, "run": run, "critic": {"path": str(first)}}
        self.config: Config = from_dict({"trainer": {"dtype": "float32", **trainer}, **sections})
        cpu = torch.device("cpu")
        self.assembly = Assembly(self.config, roles=frozenset(roles), model_dir=saved or first, rank=rank, device=cpu)
        if saved is not None:
            resume(self.assembly, saved)
        together = Together(rank, self.config.trainer.workers, seconds=TIMEOUT_SECONDS)
        self.writer = CheckpointWriter(together, keep=9, spare=None)

    def change_everything(self, seed: int) -> None:
        """As if all of it had been trained."""
        generator = torch.Generator().manual_seed(seed)
        for role in self.assembly.roles.values():
            for part in (*role.model.weight_parts(), *role.model.optimizer_parts()):
                part.values.copy_(torch.rand(part.values.shape, generator=generator))

    def save(self, folder: Path, *, final: bool = False) -> None:
        reached = Progress(policy_version=1, trained=[(0, 8)], rejected=[], prompts="")
        self.writer.begin(folder, take_snapshot(self.assembly, self.config, reached, final=final))
        assert self.writer.finish(limit=TIMEOUT_SECONDS) == ""

    def close(self) -> None:
        for role in self.assembly.roles.values():
            role.model.close()


def _go_the_way(rank: int, first: Path, folder: Path, way: Sequence[dict[str, Any]]) -> None:
    saved = None
    for number, trainer in enumerate(way):
        worker = Worker(trainer, first=first, saved=saved, rank=rank, roles=("actor", "critic"))
        if saved is None:
            worker.change_everything(rank)
        saved = folder / f"step-{number:06d}"
        worker.save(saved)
        if number == len(way) - 1:
            worker.save(folder / "final", final=True)
        worker.close()


@pytest.mark.parametrize("kind", WAYS)
def test_a_checkpoint_is_the_same_under_every_layout_and_backend(tmp_path: Path, kind: str) -> None:
    save_models(tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    way = WAYS[kind]
    run_world(4, _go_the_way, tmp_path / kind, checkpoints, way)
    first = {stem: files_of(checkpoints / "step-000000", stem) for stem in STEMS}
    for number in range(len(way)):
        folder = checkpoints / f"step-{number:06d}"
        assert progress.read(folder).policy_version == 1
        for stem, before in first.items():
            after = files_of(folder, stem)
            assert set(after.names()) == set(before.names())
            assert all(torch.equal(after.read(name), before.read(name)) for name in before.names()), (folder, stem)
    assert not first["model"].are_wholes
    wholes = checkpoints / f"step-{way.index(WHOLE):06d}"
    assert len(list(wholes.glob("model-0000?-of-00004.safetensors"))) == 4
    for folder in (wholes, checkpoints / "final"):  # Hugging Face models as they are
        check_transformers(folder, first)


def files_of(folder: Path, stem: str) -> TensorFiles:
    return TensorFiles((folder / stem).parent, Path(stem).name)


def check_transformers(folder: Path, saved: dict[str, TensorFiles]) -> None:
    """transformers finds the policy and the critic of `saved` in `folder`."""
    for kind, home, stem in (
        (AutoModelForCausalLM, folder, "model"),
        (AutoModelForSequenceClassification, folder / "critic", "critic/model"),
    ):
        weights = as_in_files(dict(kind.from_pretrained(home, dtype=torch.float32).named_parameters()))
        assert weights.keys() == set(saved[stem].names())
        assert all(torch.equal(weight, saved[stem].read(name)) for name, weight in weights.items())


def _save_large(rank: int, folder: Path, size: int) -> None:
    """Worker 0, like all, needs memory for its own part of weights and moments, and for no more."""
    worker = Worker(SHARDED, first=folder, rank=rank, roles=("actor",))
    worker.change_everything(rank)
    with peak_memory() as peak:
        worker.save(folder.parent / "checkpoints" / "step-000001")
    share = 3 * size / 4
    told = f"rank {rank}: {peak.bytes / MIB:.0f} MiB for a part of {share / MIB:.0f}"
    assert share / 2 < peak.bytes < share + SLACK, told
    worker.close()


def test_saving_takes_memory_for_ones_own_part(tmp_path: Path) -> None:
    run_world(4, _save_large, tmp_path / "large", save_large(tmp_path / "large"))
