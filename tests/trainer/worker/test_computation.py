"""What a model worker makes of groups before and after it computes: comparison, users' functions, checkpoints."""

from __future__ import annotations

import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from streamrl.config import from_dict
from streamrl.errors import DeadlineExceeded, ModelError, TrainingError
from streamrl.records import progress
from streamrl.records.evaluation import EVALUATIONS_FILE
from streamrl.records.metrics import METRICS_FILE
from streamrl.records.progress import Progress
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import (
    CallDone,
    FinishSave,
    Function,
    Inference,
    MinibatchShare,
    Offload,
    ParamRealloc,
    Save,
    SaveReply,
    TrainStep,
)
from streamrl.trainer.graph import MFC, downstream, graph_of
from streamrl.trainer.master.figures import train_metrics
from streamrl.trainer.replay import recording
from streamrl.trainer.worker.assembly import Assembly, resume
from streamrl.trainer.worker.checkpoint import HostCopy
from streamrl.trainer.worker.computation import Computation, _comparable, call_users_function
from streamrl.trainer.worker.data import WorkerData
from streamrl.types import NO_VERSION
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


def rewards_of_tokens(groups, inputs):
    return {"rewards": [np.zeros(group.tokens) for group in groups]}


def users(function, key="advantages"):
    name = f"{__name__}:{function}"
    return MFC("mine", "actor", "function", frozenset({"rewards"}), frozenset({key}), function=name)


@pytest.mark.parametrize(
    ("function", "key", "message"),
    [
        ("too_short", "advantages", "mine: .*too_short has to give one float for each token"),
        ("rewards_of_tokens", "rewards", "mine: .*rewards_of_tokens has to give one float for each trajectory"),
        ("another_key", "advantages", "mine: .*another_key has to answer a dict with advantages"),
        ("missing", "advantages", "the function of mine = .*has no missing; it has .*penalise_length"),
    ],
)
def test_a_users_function_that_breaks_its_promise_is_named(function, key, message):
    group = random_group(0, np.random.default_rng(1))
    with pytest.raises(TrainingError, match=message):
        call_users_function(users(function, key), [group], {"rewards": [group.rewards]})


class Worker:
    """The computation of one model worker, on a tiny model and a few groups."""

    def __init__(self, tmp_path, *, rank=0, groups=(), algorithm=None, run=None, model=None, limits=None, **trainer):
        config = from_dict(
            {
                "trainer": {"dtype": "float32", **trainer},
                "algorithm": algorithm or {},
                "limits": limits or {},
                "model": model or {},
                "rollout": {"group_size": 4, "sampling": {"max_new_tokens": 9}},
                "run": run or {"device": "cpu", "dir": str(tmp_path)},
            }
        )
        self.config = config
        graph = graph_of(config)
        folder = tmp_path / "model"
        if not folder.exists():
            save_model(folder)
        self.assembly = Assembly(config, roles=graph.roles, model_dir=folder, rank=rank, device=torch.device("cpu"))
        self.free = threading.Event()
        self.free.set()
        dataset = StreamDataset(rank=rank, capacity_groups=8)
        for group in groups:
            dataset.offer(group)
        self.computation = Computation(
            config,
            rank=rank,
            graph=graph,
            assembly=self.assembly,
            data=WorkerData(dataset, rank=rank),
            weights_free=self.free,
        )

    def train(self, minibatches):
        """One step on `minibatches`, each this rank's groups and the counts over all ranks."""
        return self.computation.carry_out(
            TrainStep("actor_train", 1, 0, [MinibatchShare(*part) for part in minibatches])
        )

    def save(self, folder, *, version=1, final=False):
        reached = Progress(
            policy_version=version, trained=[(0, 8)], rejected=[], prompts=progress.prompts_digest(self.config)
        )
        return self.computation.carry_out(Save(str(folder), reached, final))


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 2, "alpha": 4}}], ids=["model", "adapter"])
def test_the_checkpoint_that_was_written_last_is_the_latest(tmp_path, model):
    """By the time of its folder, whatever is copied into it, and however old that is."""
    worker = Worker(tmp_path, model=model)
    written = ["step-000009", "step-000004", "final"]  # the run had gone back before the second one
    for version, name in enumerate(written):
        worker.save(tmp_path / "checkpoints" / name, version=version, final=True)
    assert [folder.name for folder in progress.checkpoints(tmp_path)] == written


def test_a_checkpoint_holds_what_was_there_when_it_was_asked_for(tmp_path, monkeypatch):
    worker = Worker(tmp_path)
    before = {name: weight.clone() for name, weight in worker.assembly.actor.model.gather_weights()}
    go_on = threading.Event()
    content = HostCopy.content
    monkeypatch.setattr(HostCopy, "content", lambda self, stem: (go_on.wait(60), content(self, stem))[1])
    folder = tmp_path / "checkpoints" / "step-000001"
    assert worker.save(folder) == SaveReply()  # answered before anything is written
    for _, weight in worker.assembly.actor.model.gather_weights():
        weight.fill_(7.0)
    assert not folder.exists()
    go_on.set()
    assert worker.computation.carry_out(FinishSave()) == SaveReply()
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in before.items())
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 32
    assert progress.read(folder).trained == [(0, 8)]
    resume(worker.assembly, folder)
    with (folder / "state" / "actor" / "optimizer.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelError, match=r"not whole; .*remove .*step-000001: --resume continues from the one before"):
        resume(worker.assembly, folder)


def test_a_run_goes_on_from_an_adapter_to_the_bit_and_peft_reads_it(tmp_path):
    peft = pytest.importorskip("peft")
    groups = [random_group(seq, np.random.default_rng(seq)) for seq in range(2)]
    parts = [([seq], int(group.packed_loss_mask.sum()), group.size) for seq, group in enumerate(groups)]
    settings = {"groups": groups, "algorithm": {"kl_coef": 0.1}, "lr": 1e-2, "model": {"lora": {"rank": 2}}}
    run = {"device": "cpu", "dir": str(tmp_path)}
    folder = tmp_path / "checkpoints" / "step-000001"

    def weights(worker):
        return {name: weight.clone() for name, weight in worker.assembly.actor.model.gather_weights()}

    def logprobs(worker, role):
        return np.concatenate(worker.assembly.roles[role].inference(groups))

    worker = Worker(tmp_path, run=run, **settings)
    assert worker.assembly.roles["ref"].model is worker.assembly.actor.model  # there is no second copy
    before = logprobs(worker, "actor")
    assert np.array_equal(before, logprobs(worker, "ref"))
    worker.computation.carry_out(Inference("ref_inf", [0, 1]))
    worker.train(parts[:1])
    worker.save(folder, final=True)
    saved, trained = weights(worker), logprobs(worker, "actor")
    assert np.abs(trained - before).max() > 1e-3
    assert np.array_equal(before, logprobs(worker, "ref"))
    assert not list(folder.glob("model*.safetensors"))
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), folder)
    group = groups[0]
    with torch.no_grad():
        tokens = torch.from_numpy(group.packed_input_ids[: group.seqlens[0]].astype(np.int64))
        wanted = adapted(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    mask = group.packed_loss_mask[1 : group.seqlens[0]]
    assert trained[1 : group.seqlens[0]][mask] == pytest.approx(wanted[mask], abs=1e-5)

    resumed = Worker(tmp_path, run={**run, "resume_from": str(folder)}, **settings)
    resume(resumed.assembly, folder)
    assert all(torch.equal(weight, saved[name]) for name, weight in weights(resumed).items())
    resumed.computation.carry_out(Inference("ref_inf", [0, 1]))
    for each in (worker, resumed):
        each.train(parts[1:])
    last = weights(worker)
    assert any(not torch.equal(last[name], weight) for name, weight in saved.items())
    assert all(torch.equal(weight, last[name]) for name, weight in weights(resumed).items())


def test_a_checkpoint_is_there_only_when_figures_and_record_of_its_steps_are_on_the_disk(tmp_path, monkeypatch):
    """However long the record takes, and that is waited for by the thread that writes the checkpoint."""
    group = random_group(0, np.random.default_rng(0))
    run = {"device": "cpu", "dir": str(tmp_path), "name": "run", "record": True}
    worker = Worker(tmp_path, groups=[group], run=run)
    run_dir, go_on = worker.config.run_dir, threading.Event()
    metrics, evaluations = run_dir / METRICS_FILE, run_dir / EVALUATIONS_FILE
    for file in (metrics, evaluations):
        file.write_bytes(b"{}\n")
    write_step, on_disk, rename = recording.write_step, [], Path.rename

    def fsync(descriptor):
        on_disk.append(os.fstat(descriptor).st_ino)

    def put(path, target):
        if Path(target) == folder:
            on_disk.append("checkpoint")
        return rename(path, target)

    monkeypatch.setattr(recording, "write_step", lambda file, step: (go_on.wait(60), write_step(file, step)))
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", put)
    folder = run_dir / "checkpoints" / "step-000001"
    worker.train([([0], int(group.packed_loss_mask.sum()), group.size)])
    assert worker.save(folder) == SaveReply()
    threading.Timer(0.2, go_on.set).start()
    assert worker.computation.carry_out(FinishSave()) == SaveReply()
    worker.computation.close()
    part = run_dir / "record" / "from-000000" / "rank-0"
    before = on_disk[: on_disk.index("checkpoint")]
    assert len(list(part.glob("step-*"))) == 1
    for path in (metrics, evaluations, run_dir, *part.glob("step-*"), part / "part.json", part):
        assert path.stat().st_ino in before, path


def test_weights_change_only_once_their_publication_has_read_them_and_inference_does_not_wait(tmp_path, monkeypatch):
    groups = [random_group(seq, np.random.default_rng(seq), versions=(1, 2)) for seq in range(2)]
    worker = Worker(tmp_path, groups=groups, algorithm={"minibatches": 2}, lr=1e-2)
    before = {name: weight.clone() for name, weight in worker.assembly.actor.model.gather_weights()}

    def moved():
        return any(not torch.equal(before[name], now) for name, now in worker.assembly.actor.model.gather_weights())

    arrived, wait = threading.Event(), worker.free.wait
    monkeypatch.setattr(worker.free, "wait", lambda limit: (arrived.set(), wait(limit))[1])
    worker.free.clear()
    assert isinstance(worker.computation.carry_out(Inference("actor_inf", [0, 1])), CallDone)
    parts = [([seq], int(group.packed_loss_mask.sum()), group.size) for seq, group in enumerate(groups)]
    with ThreadPoolExecutor(1) as compute:
        training = compute.submit(worker.train, parts)
        assert arrived.wait(60)
        assert not training.done()
        assert not moved()
        worker.free.set()
        assert training.result(60).blocked_seconds > 0
    assert moved()


def test_the_actor_goes_away_between_publications_only(tmp_path):
    (group,) = some_groups(1)
    settings = {"graph": "tests.trainer.test_graph:users_graph"}
    hasty = Worker(tmp_path, groups=[group], limits={"call_seconds": 0.05}, **settings)
    call = Function("length_penalty", [0], post_hooks=[Offload("actor")])
    hasty.free.clear()
    with pytest.raises(DeadlineExceeded, match="publication"):
        hasty.computation.carry_out(call)
    hasty.free.set()
    worker = Worker(tmp_path, groups=[group], **settings)
    model = worker.assembly.actor.model
    before = {name: weight.clone() for name, weight in model.gather_weights()}
    over = threading.Event()

    def compute():
        while not over.is_set():
            worker.computation.carry_out(call)

    with ThreadPoolExecutor(1) as computing:
        ended = computing.submit(compute)
        for _ in range(30):  # publications, as `ModelWorker` makes them
            worker.free.clear()
            worker.computation.bring_back("actor")
            for name, weight in model.gather_weights():
                assert torch.equal(weight, before[name]), name
            worker.free.set()
            time.sleep(0.002)
        over.set()
        ended.result(60)
    worker.computation.carry_out(call)
    with pytest.raises(TrainingError, match="offloaded"):
        model.gather_weights()
    away = tmp_path / "checkpoints" / "step-000001"
    assert worker.save(away) == SaveReply()
    assert worker.computation.carry_out(FinishSave()) == SaveReply()
    saved = load_file(away / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in before.items())
    with pytest.raises(TrainingError, match="offloaded"):  # it came back for as long as it was gathered
        model.gather_weights()


def some_groups(count):
    rng = np.random.default_rng(0)
    return [random_group(seq, rng) for seq in range(count)]


def sampled(groups):
    return sum(int(group.packed_loss_mask.sum()) for group in groups)


def test_tokens_that_are_too_old_stay_out_of_the_loss(tmp_path):
    groups = some_groups(4)
    for group in groups:
        group.packed_policy_versions = np.where(group.packed_loss_mask, group.packed_input_ids % 4, NO_VERSION)
    worker = Worker(tmp_path, groups=groups, algorithm={"advantage": "gae"})
    versions = np.concatenate([group.packed_policy_versions for group in groups])
    ages = {age: int((versions == 3 - age).sum()) for age in (0, 1)}
    share = MinibatchShare([group.seq for group in groups], sum(ages.values()), sum(g.size for g in groups))
    worker.computation.carry_out(Inference("critic_inf", share.seqs))
    critic, actor = (
        worker.computation.carry_out(TrainStep(f"{role}_train", 3, 2, [share])) for role in ("critic", "actor")
    )
    assert actor.token_ages == ages
    assert actor.sums["tokens"] == critic.sums["critic/tokens"] == share.loss_tokens


@pytest.mark.parametrize("micro", [40, 400])
def test_the_effective_sample_size_is_the_batchs(tmp_path, micro):
    groups = some_groups(4)
    worker = Worker(
        tmp_path,
        groups=groups,
        max_tokens_per_microbatch=micro,
        algorithm={"minibatches": 2, "proximal": "behavior"},
        lr=1e-12,
    )
    trained = worker.train([([0, 1], sampled(groups[:2]), 8), ([2, 3], sampled(groups[2:]), 8)])
    weights = [
        math.exp(now - behavior)
        for group, logprobs in zip(groups, worker.assembly.actor.inference(groups), strict=True)
        for now, behavior, kept in zip(logprobs, group.packed_behavior_logprobs, group.packed_loss_mask, strict=True)
        if kept
    ]
    wanted = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
    assert train_metrics([trained])["effective_sample_size"] == pytest.approx(wanted, rel=1e-4)


def moving_graph(config):
    """The reference takes a tenth of the policy after each step, by a hook of the user's."""
    *others, train = downstream(config)
    return [*others, msgspec.structs.replace(train, post_hooks=(ParamRealloc("actor", "ref", share=0.1),))]


@pytest.mark.parametrize(
    "moved_by",
    [{"algorithm": {"ref_update_every": 1}}, {"graph": f"{__name__}:moving_graph"}],
    ids=["the configuration", "a graph of one's own"],
)
def test_a_reference_that_has_moved_is_what_a_run_goes_on_with_each_time_that_it_does(tmp_path, moved_by):
    """Also where it stays as it is from then on: it is no longer the first policy."""
    groups = some_groups(2)
    settings = {"groups": groups, "lr": 1e-2, "model": {"path": str(tmp_path / "model")}}
    run = {"device": "cpu", "dir": str(tmp_path)}

    def reference(worker):
        return {name: weight.clone() for name, weight in worker.assembly.roles["ref"].model.gather_weights()}

    def going_on(folder):
        found = Worker(tmp_path, algorithm={"kl_coef": 0.1}, run={**run, "resume_from": str(folder)}, **settings)
        resume(found.assembly, folder)
        return found

    graph = {name: value for name, value in moved_by.items() if name == "graph"}
    algorithm = {"kl_coef": 0.1, **moved_by.get("algorithm", {})}
    worker = Worker(tmp_path, algorithm=algorithm, run=run, **settings, **graph)
    first = reference(worker)
    worker.computation.carry_out(Inference("ref_inf", [0, 1]))
    (train,) = (mfc for mfc in graph_of(worker.config).mfcs if mfc.name == "actor_train")
    parts = [MinibatchShare([0, 1], sampled(groups), 8)]
    worker.computation.carry_out(TrainStep("actor_train", 1, 0, parts, post_hooks=list(train.post_hooks)))
    moved = reference(worker)
    assert any(not torch.equal(moved[name], weight) for name, weight in first.items())
    folders = [tmp_path / "checkpoints" / name for name in ("step-000001", "step-000002")]
    for folder in folders:
        worker.save(folder, final=True)
        worker = going_on(folder)
        assert all(torch.equal(weight, moved[name]) for name, weight in reference(worker).items())
