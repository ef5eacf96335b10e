"""Replays: of what models compute, in this process; and what is planned, refused and said."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Config, from_dict, overridden
from streamrl.device import compute_with
from streamrl.errors import ConfigError
from streamrl.launch.replay import outcome_of, prepare, verdict
from streamrl.records import progress
from streamrl.records.view import read_run
from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import (
    Function,
    Inference,
    MinibatchShare,
    Save,
    Sibling,
    TrainReply,
    TrainStep,
)
from streamrl.trainer.graph import graph_of
from streamrl.trainer.master.batches import BatchFormer
from streamrl.trainer.master.executor import hooks_of
from streamrl.trainer.redistributor import deal
from streamrl.trainer.replay import process as replaying
from streamrl.trainer.replay.plan import ReplayBatch, ReplayOutcome, ReplayPlan, changes, computed, stretch
from streamrl.trainer.replay.recording import RecordedStep, read_recording
from streamrl.trainer.worker.assembly import Assembly, resume
from streamrl.trainer.worker.computation import Computation
from streamrl.trainer.worker.data import WorkerData
from streamrl.types import SampleMeta
from tests.runs import read_steps
from tests.trainer.models import random_group, save_model

GROUPS = 4


def configured(folder: Path, **sections: dict[str, Any]) -> Config:
    model = folder / "model"
    if not model.exists():
        save_model(model)
    tree: dict[str, Any] = {
        "run": {"dir": str(folder), "name": "run", "record": True, "device": "cpu", "seed": 3},
        "model": {"path": str(model)},
        "trainer": {"batch_groups": GROUPS, "lr": 1e-2, "dtype": "float32"},
        "rollout": {"group_size": 4, "sampling": {"max_new_tokens": 9}},
        "metrics": {"sinks": [], "plots": False},
        "staleness": {"max_staleness": 2},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return from_dict(tree)


def record(config: Config, steps: range, *, save: bool = False) -> list[TrainReply]:
    """Train in this process as one model worker does, on stale groups, with `run.record`; what `actor_train` found."""
    graph = graph_of(config)
    device = torch.device("cpu")
    compute_with(config.trainer.threads)  # as many as the replay has: sums depend on it
    folder = Path(config.run.resume_from or config.model.path)
    assembly = Assembly(config, roles=graph.roles, model_dir=folder, rank=0, device=device)
    if config.run.resume_from:
        resume(assembly, folder)
    dataset, free = StreamDataset(rank=0, capacity_groups=64), threading.Event()
    free.set()
    data = WorkerData(dataset, rank=0)
    computation = Computation(config, rank=0, graph=graph, assembly=assembly, data=data, weights_free=free)
    hooks = {mfc.name: hooks_of(mfc, policy_version=steps.start - 1) for mfc in graph.mfcs}
    former = BatchFormer(config)
    found = []
    for step in steps:
        version = step - 1
        random = np.random.default_rng(step)
        seqs = list(range(step * GROUPS, (step + 1) * GROUPS))
        made = [random_group(seq, random, versions=(max(0, version - 3), version + 1)) for seq in seqs]
        for group in made:
            dataset.offer(group)
        metas = [SampleMeta.of(group, head=0) for group in made]
        for mfc in graph.mfcs:
            pre, post = hooks[mfc.name]
            if mfc.interface != "train_step":
                kind = Function if mfc.interface == "function" else Inference
                for part in (seqs[:1], seqs[1:]) if mfc.reads == "arrivals" else (seqs,):
                    computation.carry_out(kind(mfc.name, part, pre.due(version), post.due(version)))
                continue
            minibatches = [
                MinibatchShare(
                    [meta.seq for meta in part],
                    sum(former.tokens_in_loss(meta, policy_version=version) for meta in part),
                    sum(meta.size for meta in part),
                )
                for part in former.minibatches(metas)
            ]
            answer = computation.carry_out(
                TrainStep(
                    *(mfc.name, version, version - former.max_staleness, minibatches, Sibling(seqs[0], 1)),
                    pre_hooks=pre.due(version),
                    post_hooks=post.due(version + 1),
                )
            )
            assert isinstance(answer, TrainReply)
            if mfc.name == "actor_train":
                found.append(answer)
        data.discard(seqs, come_again=False)
    if save:
        reached = progress.Progress(steps[-1], [(0, (steps[-1] + 1) * GROUPS)], [], progress.prompts_digest(config))
        computation.carry_out(Save(str(config.run_dir / "checkpoints" / "mid"), reached, final=True))
    computation.close()
    return found


def test_what_a_users_function_gave_is_recorded_and_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, trainer={"graph": "tests.trainer.test_graph:users_graph"})
    record(config, range(1, 4))
    (step,) = read_recording(config.run_dir).load(2)
    assert [array.shape for array in step.given["advantages"]] == [(group.tokens,) for group in step.groups]
    monkeypatch.setattr("tests.trainer.worker.test_computation.penalise_length", lambda groups, inputs: 1 / 0)
    assert replay(config, tmp_path).difference is None


def replay(config: Config, folder: Path, *overrides: str, to: str = "again", steps: int | None = None) -> ReplayOutcome:
    """In this process."""
    prepared = prepare(config.run_dir, to=folder / to, steps=steps, overrides=overrides)
    asyncio.run(
        replaying.serve(
            prepared.config,
            run_dir=prepared.run_dir,
            index=0,
            last_step=prepared.steps.last,
            meeting_place=folder / "ranks",
        )
    )
    return outcome_of(prepared.config.run_dir)


def losses(answers: list[TrainReply]) -> list[str]:
    return [(answer.sums["loss"] / answer.updates).hex() for answer in answers]


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"minibatches": 2, "epochs": 2, "kl_coef": 0.1, "ref_update_every": 2, "kl_target": 0.5, "kl_in": "reward"},
        {"advantage": "gae", "minibatches": 2, "loss": "gspo"},
    ],
    ids=["default", "reference", "critic"],
)
def test_a_replay_is_the_run_bit_for_bit(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    config = configured(tmp_path, algorithm=algorithm)
    was = record(config, range(1, 5))
    outcome = replay(config, tmp_path)
    assert (outcome.first_step, outcome.last_step, outcome.changed, outcome.difference) == (1, 4, {}, None)
    assert outcome.environment == {}
    steps = read_run(tmp_path / "again").steps
    assert [step.metrics["loss"].hex() for step in steps] == losses(was)
    assert [step.metrics["grad_norm"].hex() for step in steps] == [answer.maxima["grad_norm"].hex() for answer in was]
    assert [step.metrics["lr"] for step in steps] == [0.01] * 4
    assert [step.token_ages for step in steps] == [dict(sorted(answer.token_ages.items())) for answer in was]
    assert [step.seqs for step in read_steps(tmp_path / "again")] == [
        list(range(n * GROUPS, (n + 1) * GROUPS)) for n in range(1, 5)
    ]
    assert progress.read(tmp_path / "again" / "checkpoints" / "final").policy_version == 4


def test_what_differs_is_named(tmp_path: Path) -> None:
    """The comparison is one: weights that are a little off in the second step are seen there."""
    config = configured(tmp_path)
    record(config, range(1, 4))
    carry_out = Computation.carry_out

    def off(self: Computation, call: Any) -> Any:
        answer = carry_out(self, call)
        if isinstance(call, TrainStep) and call.policy_version == 0:
            for _, weight in self.model("actor").gather_weights():
                weight.mul_(1 + 1e-6)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Computation, "carry_out", off)
        outcome = replay(config, tmp_path)
    assert outcome.difference is not None
    assert (outcome.difference.step, outcome.difference.figure) == (2, "actor_train: loss")
    assert "nothing is known to differ here" in verdict(outcome)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replaying, "rounding", lambda device: {"processor": "another"})
        text = verdict(replay(config, tmp_path, to="elsewhere"))
    assert "bit for bit" in text


def test_a_resumed_run_is_replayed_in_one_go(tmp_path: Path) -> None:
    """With all that a checkpoint has to keep: moments, a schedule, and a coefficient that adapts."""
    optimizer = {"betas": [0.9, 0.99], "schedule": "cosine", "warmup_steps": 3}
    algorithm = {"kl_coef": 0.2, "kl_target": 0.01}
    config = configured(tmp_path, trainer={"optimizer": optimizer}, algorithm=algorithm)
    record(config, range(1, 4), save=True)
    checkpoint = config.run_dir / "checkpoints" / "mid"
    resumed = overridden(config, [f"run.resume_from={checkpoint}", "gserver.count=3"])
    record(resumed, range(4, 6))
    assert stretch(read_recording(config.run_dir)) == (1, 5, "")
    assert replay(config, tmp_path).difference is None
    other = overridden(resumed, ["trainer.lr=0.5"])
    record(other, range(4, 6))
    assert stretch(read_recording(config.run_dir)) == (1, 3, "from there on the run had another trainer.lr")


def test_another_objective_on_the_same_data(tmp_path: Path) -> None:
    """Each step is that of a run that had this objective from the beginning."""
    config = configured(tmp_path, algorithm={"proximal": "behavior"})
    was = record(config, range(1, 4))
    outcome = replay(config, tmp_path, "algorithm.loss=cispo", "algorithm.clip_high=0.05")
    assert outcome.changed == {"algorithm.loss": ("ppo", "cispo"), "algorithm.clip_high": (0.28, 0.05)}
    assert "come from the recorded policy" in verdict(outcome)
    changed = {"proximal": "behavior", "loss": "cispo", "clip_high": 0.05}
    wanted = record(configured(tmp_path / "another", algorithm=changed), range(1, 4))
    steps = read_run(tmp_path / "again").steps
    assert [step.token_ages for step in steps] == [dict(sorted(answer.token_ages.items())) for answer in was]
    assert [step.metrics["loss"].hex() for step in steps] == losses(wanted) != losses(was)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("model.path=scratch2", r"model\.path = 'scratch2': recorded with .*a replay cannot change it"),
        ("trainer.batch_groups=2", r"trainer\.batch_groups = 2: .*cannot change it"),
        ("rollout.group_size=8", r"rollout\.group_size = 8: .*cannot change it"),
        ("data.path=other", r"data\.path = 'other': .*their origin has no effect"),
        ("run.seed=9", r"run\.seed = 9"),
        ("gserver.count=2", r"gserver\.count = 2"),
        ("run.total_train_steps=2", r"run\.total_train_steps = 2"),
        ("trainer.backend=megatron", r"trainer\.backend = 'megatron'"),
        ("algorithm.losses=cispo", "unknown key algorithm.losses; did you mean"),
        ("algorithm.loss", "write it as section.key=value"),
    ],
)
def test_what_cannot_be_changed_is_refused_by_name(tmp_path: Path, override: str, why: str) -> None:
    config = configured(tmp_path)
    record(config, range(1, 2))
    with pytest.raises(ConfigError, match=why):
        prepare(config.run_dir, to=None, steps=None, overrides=[override])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"], "nothing is left behind"


@given(st.data())
def test_without_changes_the_calls_are_the_recorded_ones(data: st.DataObject) -> None:
    """However groups were dealt over the ranks, and cut into minibatches."""
    ranks, minibatches = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    config = from_dict(
        {
            "trainer": {"batch_groups": 9, "data_parallel": ranks},
            "algorithm": {"minibatches": minibatches, "kl_coef": 0.1, "ref_update_every": 2},
            "staleness": {"max_staleness": 1},
        }
    )
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    version = data.draw(st.integers(0, 5))
    made = {seq: random_group(seq, random, versions=(0, version + 1)) for seq in range(9)}
    homes = data.draw(st.lists(st.integers(0, ranks - 1), min_size=9, max_size=9))
    former, graph = BatchFormer(config), graph_of(config)
    metas = [SampleMeta.of(made[seq], head=homes[seq]) for seq in made]

    def shares(part: Any) -> list[list[int]]:
        home = {meta.seq: meta.head for meta in part}
        return deal({meta.seq: meta.tokens for meta in part}, ranks=ranks, home=home)

    parts = [(shares(part), part) for part in former.minibatches(metas)]
    steps = []
    for rank in range(ranks):
        own = [
            MinibatchShare(
                dealt[rank],
                sum(former.tokens_in_loss(meta, policy_version=version) for meta in part),
                sum(meta.size for meta in part),
            )
            for dealt, part in parts
        ]
        train = TrainStep("actor_train", version, version - 1, own, Sibling(0, 2))
        calls: list[Any] = [Inference("actor_inf", shares(metas)[rank])] if minibatches > 1 else []
        mine = [made[seq] for dealt, _ in parts for seq in dealt[rank]]
        known = {"ref_logprobs": [np.zeros(group.tokens, np.float32) for group in mine]}
        steps.append(RecordedStep(version + 1, rank, [*calls, train], [], mine, known))
    batch = ReplayBatch(steps)
    mfcs = computed(graph, batch.keys)
    assert [mfc.name for mfc in mfcs] == (["actor_inf"] if minibatches > 1 else []) + ["actor_train"]
    for rank in range(ranks):
        plan = ReplayPlan(config, mfcs, rank=rank, policy_version=version, changed=[])
        assert plan.calls(batch) == steps[rank].calls
    shared = overridden(config, ["trainer.context_parallel=2"])
    for rank in range(2 * ranks):  # two of them share the rows of one that was recorded
        plan = ReplayPlan(shared, mfcs, rank=rank, policy_version=version, changed=changes(config, shared))
        assert plan.calls(batch) == steps[rank // 2].calls
    single = overridden(config, ["trainer.data_parallel=1", "algorithm.minibatches=3"])
    anew = ReplayPlan(
        single, computed(graph_of(single), batch.keys), rank=0, policy_version=version, changed=changes(config, single)
    )
    *_, train = anew.calls(batch)
    assert isinstance(train, TrainStep)
    assert [minibatch.seqs for minibatch in train.minibatches] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert sum(m.loss_tokens for m in train.minibatches) == sum(dealt_tokens(steps[0]))


def dealt_tokens(step: RecordedStep) -> list[int]:
    return [m.loss_tokens for call in step.calls if isinstance(call, TrainStep) for m in call.minibatches]
