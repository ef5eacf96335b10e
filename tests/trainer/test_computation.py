"""What a model worker makes of groups before and after it computes: comparison, users' functions, checkpoints."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from streamrl import progress
from streamrl.config import from_dict
from streamrl.errors import DeadlineExceeded, TrainingError
from streamrl.progress import Progress
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.assembly import Assembly, resume
from streamrl.trainer.calls import Save, Saved, SettleSave
from streamrl.trainer.computation import Computation, _comparable, call_users_function
from streamrl.trainer.graph import MFC, graph_of
from streamrl.trainer.snapshot import Snapshot
from streamrl.trainer.worker_data import WorkerData
from tests.trainer.models import random_group, save_model


@given(st.integers(0, 10_000), st.integers(0, 2), st.booleans())
def test_only_responses_of_one_version_are_compared(seed, version, gaps):
    group = random_group(0, np.random.default_rng(seed), longest=4, gaps=gaps, versions=(0, 3))
    got = _comparable(group, version)
    start = 0
    for length in group.seqlens.tolist():
        mask = group.packed_loss_mask[start : start + length]
        versions = group.packed_policy_versions[start : start + length]
        pure = {int(v) for v, sampled in zip(versions, mask, strict=True) if sampled} == {version}
        assert got[start : start + length].tolist() == [pure and bool(sampled) for sampled in mask]
        start += length


def penalise_length(groups, inputs):
    """Each token costs a hundredth of the response's reward."""
    found = []
    for group, rewards in zip(groups, inputs["rewards"], strict=True):
        found.append(np.repeat(rewards - 0.01 * group.seqlens, group.seqlens))
    return {"advantages": found}


def too_short(groups, inputs):
    return {"advantages": [np.zeros(3) for _ in groups]}


def another_key(groups, inputs):
    return {"values": []}


def users(function):
    name = f"{__name__}:{function}"
    return MFC("mine", "actor", "function", frozenset({"rewards"}), frozenset({"advantages"}), function=name)


def test_a_users_function_gives_its_keys():
    group = random_group(0, np.random.default_rng(1))
    found = call_users_function(users("penalise_length"), [group], {"rewards": [group.rewards]})
    assert found["advantages"][0].shape == (group.tokens,)
    assert found["advantages"][0].dtype == np.float32


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_short", "mine: .*too_short has to give one float for each token"),
        ("another_key", "mine: .*another_key has to answer a dict with advantages"),
        ("missing", "mine: .*missing cannot be imported"),
    ],
)
def test_a_users_function_that_breaks_its_promise_is_named(function, message):
    group = random_group(0, np.random.default_rng(1))
    with pytest.raises(TrainingError, match=message):
        call_users_function(users(function), [group], {"rewards": [group.rewards]})


class Worker:
    """The computation of a run's only model worker, on a tiny model."""

    def __init__(self, tmp_path, **trainer):
        config = from_dict({"trainer": {"dtype": "float32", **trainer}, "run": {"device": "cpu"}})
        graph = graph_of(config)
        folder = save_model(tmp_path / "model")
        self.assembly = Assembly(config, roles=graph.roles, model_dir=folder, rank=0, device=torch.device("cpu"))
        self.free = threading.Event()
        self.free.set()
        data = WorkerData(StreamDataset(rank=0, capacity_groups=1), rank=0)
        self.computation = Computation(
            config, rank=0, graph=graph, assembly=self.assembly, data=data, weights_free=self.free
        )

    def save(self, folder, *, version=1, final=False):
        reached = Progress(policy_version=version, trained=[(0, 8)], rejected=[], prompts="")
        return self.computation.carry_out(Save(str(folder), reached, final))


def test_a_checkpoint_holds_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    worker = Worker(tmp_path)
    before = {name: weight.clone() for name, weight in worker.assembly.actor.model.gather_weights()}
    go_on = threading.Event()
    write = Snapshot.write
    monkeypatch.setattr(Snapshot, "write", lambda self, folder: (go_on.wait(60), write(self, folder)))
    folder = tmp_path / "checkpoints" / "step-000001"
    assert worker.save(folder) == Saved()  # answered before anything is written
    for _, weight in worker.assembly.actor.model.gather_weights():
        weight.fill_(7.0)
    assert not folder.exists()
    go_on.set()
    assert worker.computation.carry_out(SettleSave()) == Saved()
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in before.items())
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 32
    assert progress.read(folder).trained == [(0, 8)]
    resume(worker.assembly, folder)


def test_a_checkpoint_waits_for_the_publication_of_its_weights(tmp_path):
    worker = Worker(tmp_path, step_timeout_seconds=0.05)
    worker.free.clear()
    with pytest.raises(DeadlineExceeded, match="publication"):
        worker.save(tmp_path / "checkpoints" / "step-000001")


def test_only_the_last_checkpoint_has_to_succeed(tmp_path):
    worker = Worker(tmp_path)
    (tmp_path / "file").write_text("no folder")
    assert worker.save(tmp_path / "file" / "step-000001") == Saved()
    told = worker.save(tmp_path / "checkpoints" / "step-000002", version=2)
    assert "step-000001 cannot be written" in told.unwritten
    assert worker.save(tmp_path / "checkpoints" / "final", version=2, final=True) == Saved()
    assert progress.read(tmp_path / "checkpoints" / "final").policy_version == 2
    with pytest.raises(TrainingError, match=r"final cannot be written \(.*--resume"):
        worker.save(tmp_path / "file" / "final", version=3, final=True)
