"""The master and its executor alone: what they ask of whom, and when, in runs whose other parts are pretended."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config import from_dict
from streamrl.errors import PeerError, PeerLost, first_error
from streamrl.records import progress, snapshots
from streamrl.trainer.graph import downstream
from streamrl.transport.control import EvaluationStatus, EvaluationTask
from streamrl.transport.request_reply import FIRST_ROLLOUT_WORKER
from tests.evaluations import make_report
from tests.trainer.pretended import Script, clock, make_group, pretended, virtually, whole_run


def configured(folder, **sections):
    """Batches of 4 groups on one model worker, 6 steps, η = 2, unless `sections` say otherwise."""
    tree = {
        "run": {"dir": str(folder), "name": "pretended", "total_train_steps": 6},
        "metrics": {"sinks": []},
        "trainer": {"batch_groups": 4},
        "staleness": {"max_staleness": 2},
        "rollout": {"group_size": 2},
    }
    for name, section in sections.items():
        tree[name] = tree.get(name, {}) | section
    return from_dict(tree)


def fails_in(name, error, *, count=0):
    """`error` when `name` happens for the `count`-th time, from 0."""
    return lambda happens, before: error if (happens, before) == (name, count) else None


def lasting(**seconds):
    """How long calls take, by the names of MFCs and calls."""
    return lambda name, count: seconds.get(name, 0.0)


def flat(steps):
    return [seq for step in steps for seq in step]


def assert_exactly_once(run, before=()):
    """No group was trained on twice, none is lost, and manager and trainer agree about each.

    `before`: what a run had trained on that this one goes on from.
    """
    trained, ledger = [*before, *flat(run.steps)], run.manager.ledger
    assert len(trained) == len(set(trained))
    held = {seq for dataset in run.workers.datasets.values() for seq in range(ledger.next_seq) if dataset.find(seq)}
    fates = Counter([*trained, *(held - set(trained)), *ledger.rejected])
    for seq in range(ledger.next_seq):
        out = ledger.state(seq) in ("leased", "returned")
        assert fates[seq] + out == 1 or (seq in held and out), f"seq {seq}"  # held and out: not heard of yet
    assert held.isdisjoint(trained)


@st.composite
def runs(draw):
    """Settings and a script of any run that can go well."""
    groups = draw(st.integers(1, 5))
    sections = {
        "staleness": {
            "max_staleness": draw(st.integers(0, 3)),
            "over_age": draw(st.sampled_from(["mask", "wait", "drop"])),
        },
        "trainer": {"batch_groups": groups, "data_parallel": draw(st.integers(1, min(groups, 3)))},
        "algorithm": {"minibatches": draw(st.integers(1, min(groups, 2))), "kl_coef": draw(st.sampled_from([0, 0.1]))},
    }
    chance = random.Random(draw(st.integers(0, 2**32 - 1)))
    slow = draw(st.sampled_from([0.0, 3.0, 20.0]))
    longest = draw(st.sampled_from([1, 5, 40]))
    given_up = draw(st.sampled_from([0.0, 0.1, 0.5]))

    script = Script(
        tokens=lambda seq: chance.randint(1, longest),  # anew for each time that the prompt is given out
        copies=lambda seq: chance.choice([(0.0,), (2.5,), (0.0, 0.0), (0.0, 7.0, 30.0)]),
        rejects=lambda seq: chance.random() < given_up,
        seconds=lambda name, count: chance.uniform(0, slow),
        slots=draw(st.integers(1, 20)),
    )
    return sections, script


@given(runs())
@settings(max_examples=60)
def test_every_group_is_trained_on_once_and_young_enough(drawn):
    sections, script = drawn
    with tempfile.TemporaryDirectory() as folder:
        config = configured(folder, **sections)
        reason, run = whole_run(config, script)
    assert reason == "6 steps are done"
    assert [len(step) for step in run.steps] == [config.trainer.batch_groups] * 6
    assert_exactly_once(run)
    staleness = config.staleness
    for version, report in enumerate(run.manager.reports):
        if version in run.manager.answers:  # else no group was young enough as a whole, or the answer came too late
            assert report.metrics["gservers_compared"] == len(run.manager.answers[version])
            assert report.metrics.get("logprob_diff_max", 0.0) == 0.0
        else:
            assert report.metrics["gservers_compared"] == 0
        assert all(0 <= age <= staleness.max_staleness for age in report.token_ages)
        if staleness.over_age != "mask" or staleness.max_staleness == 0:
            assert report.metrics["tokens_masked"] == 0
    if staleness.over_age == "wait":
        trained = flat(run.steps)
        given_up = set(run.manager.ledger.rejected)
        assert trained == [seq for seq in range(max(trained) + 1) if seq not in given_up]


def test_mask_takes_the_oldest_admissions_and_leaves_old_tokens_out(tmp_path):
    """The first group takes so long that its first tokens are too old when it comes."""
    script = Script(tokens=lambda seq: 12 if seq == 0 else 2, seconds=lasting(actor_train=3.0))
    _, run = whole_run(configured(tmp_path), script)
    (late,) = [report for report in run.manager.reports if 0 in report.seqs]
    assert late.seqs[0] == 0
    assert late.metrics["tokens_masked"] > 0
    assert late.metrics["tokens_trained"] + late.metrics["tokens_masked"] == late.metrics["tokens_sampled"]
    assert sum(late.masked_ages.values()) == late.metrics["tokens_masked"]
    assert min(late.masked_ages) > 2 >= max(late.token_ages)
    assert all(not report.masked_ages for report in run.manager.reports if not report.metrics["tokens_masked"])


def test_batches_follow_a_change_of_max_staleness(tmp_path):
    """Groups are still admitted as before, and have older tokens."""

    async def work():
        async with pretended(configured(tmp_path), Script(seconds=lasting(actor_train=3.0))) as run:
            run.manager.ledger.max_staleness = 0
            await run.master.run()
            reports = run.manager.reports
            assert sum(report.metrics["tokens_masked"] for report in reports) > 0
            assert all(report.token_ages.keys() <= {0} for report in reports)

    virtually(work())


def test_wait_holds_training_up_for_the_group_whose_turn_it_is(tmp_path, caplog):
    async def work():
        script = Script(tokens=lambda seq: 500 if seq == 1 else 1)
        async with pretended(configured(tmp_path, staleness={"over_age": "wait"}), script) as run:
            training = asyncio.create_task(run.master.run())
            await asyncio.sleep(499)
            assert run.steps == []
            lacking = "1 of 4 groups for actor_train v0, oldest seq 1"
            assert run.master.waiting_for == lacking
            assert f"waiting for {lacking}, for 30 s now" in caplog.text
            await training
            assert run.steps[0] == [0, 1, 2, 3]

    virtually(work())


def test_a_group_that_is_dropped_comes_again(tmp_path):
    lengths = iter([20])
    script = Script(tokens=lambda seq: next(lengths, 2) if seq == 0 else 2, slots=8)
    config = configured(tmp_path, staleness={"over_age": "drop"}, run={"total_train_steps": 30})
    _, run = whole_run(config, script)
    assert run.manager.ledger.dropped == 1
    assert 0 in flat(run.steps)
    assert_exactly_once(run)
    final = json.loads((config.run_dir / "final.json").read_text())
    assert final["tokens_dropped"] == 40
    assert sum(report.metrics["tokens_dropped"] for report in run.manager.reports) == 40
    assert [report.metrics["groups_dropped"] for report in run.manager.reports if report.metrics["groups_dropped"]] == [
        1
    ]


def test_a_publication_that_fails_ends_the_run_with_its_error_while_a_batch_is_awaited(tmp_path):
    async def work():
        script = Script(
            tokens=lambda seq: 2 if seq < 8 else 50_000,
            fails=fails_in("Publish", PeerError("model_worker/0 failed in Publish: no gserver"), count=1),
            seconds=lasting(Publish=20.0),
        )
        async with pretended(configured(tmp_path), script) as run:
            with pytest.raises(BaseExceptionGroup) as failure:
                await run.master.run()
            assert "no gserver" in str(first_error(failure.value))
            assert len(run.steps) == 1
            assert clock() < 100

    virtually(work())


def test_gservers_that_are_there_first_get_weights_once_the_workers_have_some(tmp_path):
    """As on machines that have no copy of the checkpoint that the run goes on from."""

    async def work():
        script = Script(seconds=lasting(Initialize=50.0), tokens=lambda seq: 60)  # no batch before that
        async with pretended(configured(tmp_path), script) as run:
            run.manager.lacking.add("gserver/0")
            await run.master.run()
            assert not run.manager.lacking
        (loading,), first = run.workers.named("Initialize"), run.workers.named("Publish")[0]
        assert first.call.resync
        assert first.begin >= loading.end >= 50.0

    virtually(work())


def test_a_slow_publication_holds_up_the_next_update_but_not_what_comes_before_it(tmp_path):
    """That weights stay as they are while they are read is asserted by the pretended workers."""
    script = Script(seconds=lasting(reading=50.0, Publish=10.0, actor_inf=1.0, ref_inf=1.0, actor_train=1.0))
    config = configured(tmp_path, algorithm={"minibatches": 2, "kl_coef": 0.1})
    _, run = whole_run(config, script)
    publications, inferences = run.workers.named("Publish"), run.workers.named("actor_inf")
    trainings = run.workers.named("actor_train")
    assert [event.call.version for event in publications] == [1, 2, 3, 4, 5, 6]
    for publication, inference, training in zip(publications, inferences[1:], trainings[1:], strict=False):
        assert publication.begin <= inference.begin < inference.end < publication.begin + 50.0
        assert training.begin < publication.begin + 50.0 <= training.end < publication.end
    for one, another in itertools.pairwise(publications):
        assert one.end <= another.begin
    assert any(
        publication.begin < event.begin < event.end < publication.end
        for publication in publications
        for event in run.workers.named("ref_inf")
    )


def test_gservers_are_compared_at_every_version_that_is_trained_from(tmp_path):
    """Also where no response is of age 0; one that differs is named, and ends the run."""

    def opinions(version):
        return [-0.5, -0.6 if version == 4 else -0.5]

    async def work(**trainer):
        script = Script(tokens=lambda seq: 12, seconds=lasting(actor_train=3.0, ResponseRequest=2.0))
        config = configured(tmp_path, trainer={"data_parallel": 2, **trainer}, algorithm={"minibatches": 2})
        async with pretended(config, script) as run:
            run.manager.opinions = opinions
            with pytest.raises(BaseExceptionGroup) as failure:
                await run.master.run()
        return str(first_error(failure.value)), run

    said, run = virtually(work(logprob_diff_limit=0.09))
    assert said.startswith("gserver/1 and the trainer differ by 0.1 nats for each token, under version 4")
    figures = [report.metrics for report in run.manager.reports]
    assert [round(found["logprob_diff_mean/gserver_1"], 3) for found in figures] == [0, 0, 0, 0, 0.1]
    assert {found["logprob_diff_mean/gserver_0"] for found in figures} == {0.0}
    assert any("sampling_diff_mean" not in found for found in figures)


def test_checkpoints_come_after_the_right_steps_and_say_how_far_the_run_was(tmp_path):
    script = Script(rejects=lambda seq: seq % 5 == 0, seconds=lasting(Save=30.0, actor_train=1.0), rows=17)
    config = configured(tmp_path, run={"total_train_steps": 5}, trainer={"save_every": "2 steps"})
    _, run = whole_run(config, script)
    saves = run.workers.named("Save")
    assert [Path(event.call.folder).name for event in saves] == ["step-000002", "step-000004", "final"]
    assert [event.call.final for event in saves] == [False, False, True]
    for event, done in zip(saves, (2, 4, 5), strict=True):
        reached = event.call.progress
        assert reached.policy_version == done
        assert list(reached.trained_seqs()) == sorted(flat(run.steps[:done]))
        assert {seq for seq in range(max(reached.trained_seqs())) if seq % 5 == 0} <= set(reached.rejected_seqs())
        assert set(reached.rejected_seqs()) <= set(run.manager.ledger.rejected)
        assert (reached.data_rows, reached.data_digest) == (17, "of the pretended data")
        assert reached.recent_rewards == [0.5] * done
        assert reached.prompts == progress.prompts_digest(config)
    for save in saves[:2]:  # what is trained next is not in it
        assert not [event for event in run.workers.named("actor_train") if save.begin <= event.begin < save.end]
    assert run.workers.events[-2].name == "FinishSave"


def test_snapshots_are_taken_after_steps_without_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setitem(snapshots.folder_of.__kwdefaults__, "root", tmp_path / "memory")
    config = configured(
        tmp_path, run={"total_train_steps": 6}, trainer={"save_every": "4 steps", "snapshot_every_steps": 1}
    )

    async def work(*, reads_snapshots):
        async with pretended(config) as run:
            run.manager.reads_snapshots = reads_snapshots
            await run.master.run()
        folders = [Path(event.call.folder) for event in run.workers.named("Save")]
        return [(folder.name, folder.parent == snapshots.folder_of(config.run_dir)) for folder in folders]

    steps = [(f"step-{step:06d}", step != 4) for step in range(1, 7)]
    assert virtually(work(reads_snapshots=True)) == steps
    assert virtually(work(reads_snapshots=False)) == [("step-000004", False)], "model worker 0 is on another host"


def moving_away(*, first):
    """Figures of a policy that is near its data, and from the step from version `first` on far from it."""

    def figures(version, tokens):
        size = 0.1 if version >= first else 1.0
        return {"ratio": tokens, "ratio_squares": tokens / size, "ratio_deviation": tokens * (1 - size)}

    return figures


def losing_reward(*, first):
    """Groups whose responses all score 1; from sequence number `first` on, 0."""

    def group(seq, versions):
        return msgspec.structs.replace(make_group(seq, versions), rewards=np.full(2, float(seq < first), np.float32))

    return group


def test_a_run_admits_by_the_drift_of_its_policy_also_when_it_is_resumed(tmp_path):
    """Far from its data, a policy has data of the last version."""
    config = configured(
        tmp_path,
        run={"total_train_steps": 40},
        staleness={"max_staleness": 4, "most_drift": 0.2},
        trainer={"save_every": "36 steps"},
    )
    _, run = whole_run(config, Script(figures=moving_away(first=30)))
    admitted = [report.metrics["admitted_staleness"] for report in run.manager.reports]
    assert admitted[:4] == [1, 2, 3, 4]
    assert set(admitted[4:29]) == {4}
    assert set(admitted[31:]) == {1}
    again = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, resume_from=str(config.run_dir / "checkpoints" / "step-000036")),
    )
    _, resumed = whole_run(again, Script(figures=moving_away(first=30)))
    assert [report.metrics["admitted_staleness"] for report in resumed.manager.reports] == admitted[36:]


@pytest.mark.parametrize(
    ("changes", "scaled"),
    [
        ({}, True),
        ({"staleness": {"lr_by_contrast": False}}, False),
        ({"staleness": {"max_staleness": 0}}, False),
        ({"algorithm": {"advantage": "reinforce++"}}, False),
    ],
)
def test_with_stale_data_a_batch_in_which_few_groups_teach_takes_a_smaller_step(tmp_path, changes, scaled):
    config = configured(tmp_path, run={"total_train_steps": 12}, **changes)
    teaching = 8 * config.trainer.batch_groups
    """From then on one group in four has different rewards."""

    def group(seq, versions):
        rewards = [0, 1] if seq < teaching or seq % 4 == 0 else [1, 1]
        return msgspec.structs.replace(make_group(seq, versions), rewards=np.array(rewards, np.float32))

    _, run = whole_run(config, Script(group=group))
    scales = [event.call.lr_scale for event in run.workers.named("actor_train")]
    assert len(scales) == 12
    assert set(scales[:7]) == {1.0}
    assert min(scales) == pytest.approx(0.5) if scaled else set(scales) == {1.0}


def test_a_run_that_collapses_stops_with_a_checkpoint_and_says_where_to_go_on(tmp_path):
    async def work():
        script = Script(figures=moving_away(first=30), group=losing_reward(first=140))
        config = configured(
            tmp_path,
            run={"total_train_steps": 60},
            algorithm={"on_collapse": "stop"},
            trainer={"save_every": "4 steps", "keep_checkpoints": 1},
        )
        async with pretended(config, script) as run:
            with pytest.raises(BaseExceptionGroup) as failure:
                await run.master.run()
        return str(first_error(failure.value)), run

    said, run = virtually(work())
    step = len(run.steps)
    assert 35 < step < 45
    assert run.manager.reports[-1].health.state == "collapsing"
    folders = [Path(event.call.folder) for event in run.workers.named("Save")]
    assert folders[-1].name == f"step-{step:06d}"
    states = {folder.name: progress.read(folder).watch.health.state for folder in folders}
    healthy = [folder for folder in folders if states[folder.name] == "healthy"][-1]
    assert states[folders[-1].name] == "collapsing"
    for part in ("is collapsing", "reward fallen from", "staleness.max_staleness=1", f"run.resume_from={healthy}"):
        assert part in said
    progress.prune(folders[0].parent, keep=1, spare=None)
    assert {path for path in folders[0].parent.iterdir()} == {healthy, folders[-1]}


def test_an_evaluation_is_asked_for_once_the_gservers_have_the_version(tmp_path):
    script = Script(seconds=lasting(Publish=40.0, evaluation=5.0))
    config = configured(
        tmp_path,
        run={"total_train_steps": 5},
        evaluation={"every": "2 steps", "at_start": True, "at_end": True},
    )
    reason, run = whole_run(config, script)
    assert reason == "5 steps are done"
    assert [version for version, _, _ in run.manager.evaluated] == [0, 2, 4, 5]
    assert [served for _, _, served in run.manager.evaluated] == [0, 2, 4, 5]
    assert [over for _, over, _ in run.manager.evaluated] == [False, False, False, True]
    written = (config.run_dir / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["policy_version"] for line in written] == [0, 2, 4, 5]


@pytest.mark.parametrize(
    ("prompts", "done"), [(2, "1 of 2 prompts are done"), (0, "no rollout worker has opened the held-out data")]
)
def test_the_end_does_not_wait_for_an_evaluation_for_ever(tmp_path, caplog, prompts, done):
    config = configured(
        tmp_path,
        run={"total_train_steps": 2},
        evaluation={"every": "9 steps", "at_end": True},
        limits={"evaluation_seconds": 50.0},
    )

    async def work():
        async with pretended(config, Script(seconds=lasting(evaluation=51.0))) as run:
            run.manager.evaluation = EvaluationStatus(None, None, 0, 0, None, prompts=prompts, prompts_done=1)
            return await run.master.run() + await run.master.finish()

    missed = "the evaluation of version 2 was not finished within limits.evaluation_seconds = 50"
    assert virtually(work()) == f"2 steps are done; {missed} ({done})"
    assert missed in caplog.text


def test_an_evaluation_that_the_end_does_not_wait_for_is_named(tmp_path, caplog):
    config = configured(tmp_path, run={"total_train_steps": 2}, evaluation={"every": "1 step"})

    async def work():
        async with pretended(config, Script(seconds=lasting(evaluation=51.0))) as run:
            run.manager.evaluation = EvaluationStatus(None, EvaluationTask(2, step=2), 0, 0, None)
            return await run.master.run() + await run.master.finish()

    assert virtually(work()) == "2 steps are done"
    assert "the run ends before the evaluation of version 2 is done: set evaluation.at_end" in caplog.text


def test_an_evaluation_that_was_lost_is_asked_for_again_from_its_checkpoint_and_no_other(tmp_path):
    """Most groups are given up: then an epoch may end with those, before the last ones of the batch are trained on."""
    script = Script(rejects=lambda seq: seq % 4 > 0, rows=23)
    saved = {"save_every": "1 step", "keep_checkpoints": 9}
    config = configured(tmp_path, trainer=saved, evaluation={"every": "1 epoch"})
    _, run = whole_run(config, script)
    due = {version for version, _, _ in run.manager.evaluated}
    assert 1 < len(due) < 6
    for version, lost in itertools.product(range(1, 6), (True, False)):
        kept = b"" if lost else msgspec.json.encode(make_report(version)) + b"\n"
        (config.run_dir / "evaluations.jsonl").write_bytes(kept)
        folder = config.run_dir / "checkpoints" / f"step-{version:06d}"
        again = configured(
            tmp_path,
            run={"total_train_steps": version + 1, "resume_from": str(folder)},
            trainer={"save_at_end": False},
            evaluation={"every": "1 epoch"},
        )
        _, resumed = whole_run(again, script)
        asked = {version for version, _, _ in resumed.manager.evaluated}
        assert asked & {version} == (due & {version} if lost else set())


def test_mfcs_on_arrivals_read_each_group_once_and_batches_wait_for_them(tmp_path):
    """That each call finds what it needs, on whichever worker, is asserted by the pretended workers."""
    script = Script(
        tokens=lambda seq: 1 + seq % 7, seconds=lasting(ref_inf=2.0, rew_inf=1.0), scores=lambda seq: [seq, seq + 2]
    )
    config = configured(
        tmp_path,
        trainer={"data_parallel": 2, "tensor_parallel": 2, "backend": "megatron"},
        algorithm={"kl_coef": 0.1, "minibatches": 2},
        reward_model={"path": "somewhere"},
    )
    _, run = whole_run(config, script)
    by_worker = Counter()
    for name in ("ref_inf", "rew_inf"):
        assert all(len(event.call.seqs) <= 4 for event in run.workers.named(name))
        by_worker[name] = len(run.workers.named(name))
    assert min(by_worker.values()) >= 2
    for report in run.manager.reports:  # the rewards are the model's
        assert report.metrics["reward_mean"] == pytest.approx(sum(report.seqs) / 4 + 1)
    assert_exactly_once(run)


def in_threes(config):
    """`ref_inf` on arrivals and `actor_inf` on batches, three groups in a call."""
    inferences = ("ref_inf", "actor_inf")
    return [msgspec.structs.replace(mfc, groups=3) if mfc.name in inferences else mfc for mfc in downstream(config)]


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_calls_have_as_many_groups_as_asked_for_and_the_rest_of_a_batch_is_not_waited_for(tmp_path, max_staleness):
    """Batches of 4: at 0 nothing arrives before the fourth group has been read, alone, and trained on."""
    config = configured(
        tmp_path,
        trainer={"graph": "tests.trainer.master.test_process:in_threes"},
        staleness={"max_staleness": max_staleness},
        algorithm={"kl_coef": 0.1, "minibatches": 2},
    )
    script = Script(tokens=lambda seq: 1 + seq % 7, seconds=lasting(ref_inf=0.5, actor_train=20.0))
    _, run = whole_run(config, script)
    assert_exactly_once(run)
    on_arrivals, on_batch = ([len(e.call.seqs) for e in run.workers.named(n)] for n in ("ref_inf", "actor_inf"))
    assert on_batch == [3, 1] * 6
    if max_staleness == 0:
        assert on_arrivals == [3, 1] * 6
    else:
        assert on_arrivals.count(3) > len(on_arrivals) / 2
        assert max(on_arrivals) == 3


def test_a_synchronous_graph_has_each_batch_made_under_the_weights_that_it_trains(tmp_path):
    script = Script(rejects=lambda seq: seq % 6 == 1, seconds=lasting(Generate=5.0, Score=1.0, Publish=3.0))
    config = configured(
        tmp_path, trainer={"graph": "synchronous"}, staleness={"max_staleness": 0}, rollout={"workers": 2}
    )
    _, run = whole_run(config, script)
    assert_exactly_once(run)
    assert flat(run.steps) == [seq for seq in range(max(flat(run.steps)) + 1) if seq % 6 != 1]
    for report in run.manager.reports:
        assert list(report.token_ages) == [0]
        spans = [name for name, _, _ in report.spans]
        assert spans.index("actor_gen") < spans.index("rew_inf") < spans.index("actor_train")


@pytest.mark.parametrize("during", ["GenerateGroups", "ScoreGroups"])
def test_a_rollout_worker_that_dies_in_a_synchronous_graph_is_made_up_for(tmp_path, during):
    async def work():
        script = Script(seconds=lasting(Generate=5.0, Score=5.0))
        config = configured(
            tmp_path, trainer={"graph": "synchronous"}, staleness={"max_staleness": 0}, rollout={"workers": 2}
        )
        async with pretended(config, script) as run:
            training = asyncio.create_task(run.master.run())
            await asyncio.sleep(13.0 if during == "GenerateGroups" else 18.0)
            assert len(run.workers.events) - len(run.workers.named("ScoreGroups")) > 0
            run.workers.lose(FIRST_ROLLOUT_WORKER + 1)
            await training
            assert sorted(flat(run.steps)) == list(range(24))
            assert_exactly_once(run)

    virtually(work())


@pytest.mark.parametrize(
    ("settings", "script", "reason", "steps"),
    [
        ({"total_train_steps": 3}, {}, "3 steps are done", 3),
        ({"total_train_epochs": 2}, {"rows": 10}, "2 epochs are done after 5 steps", 5),
        ({"stop_at_reward": 0.5}, {}, "the mean reward reached 0.500 after 5 steps", 5),
        (
            {"total_train_epochs": 1},
            {"rows": 6, "rejects": lambda seq: seq >= 4, "tokens": lambda seq: 3 * seq + 1},
            "1 epochs are done after 1 steps",  # the last groups are given up while their batch is awaited
            1,
        ),
    ],
)
def test_a_run_ends_by_steps_epochs_or_reward(tmp_path, settings, script, reason, steps):
    settings = {"total_train_steps": None} | settings if "total_train_epochs" in settings else settings
    config = configured(tmp_path, run=settings)
    found, run = whole_run(config, Script(**script))
    assert (found, len(run.steps)) == (reason, steps)
    assert_exactly_once(run)
    if steps == 5 and "epochs" in reason:
        assert run.manager.ledger.next_seq == 20  # nothing beyond the end
    final = json.loads((config.run_dir / "final.json").read_text())
    assert (final["policy_version"], final["groups_trained"]) == (steps, 4 * steps)
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["seqs"] for line in lines] == run.steps


@pytest.mark.parametrize("busy_with", ["Initialize", "ref_inf", "actor_train", "Publish", "Save"])
def test_a_run_that_is_stopped_ends_at_once_whatever_it_is_busy_with(tmp_path, busy_with):
    async def work():
        script = Script(tokens=lambda seq: 4 if seq < 4 else 300, seconds=lasting(**{busy_with: 500.0}))
        config = configured(tmp_path, algorithm={"kl_coef": 0.1}, trainer={"save_every": "1 step"})
        async with pretended(config, script) as run:
            training = asyncio.create_task(run.master.run())
            await asyncio.sleep(100.0)
            training.cancel()
            await asyncio.wait([training])
        assert clock() == 100.0

    virtually(work())


@pytest.mark.parametrize("name", ["Initialize", "ref_inf", "actor_inf", "actor_train", "Publish", "ClearDataCache"])
def test_the_death_of_a_worker_ends_the_run_and_names_it(tmp_path, name):
    async def work():
        config = configured(tmp_path, trainer={"data_parallel": 2}, algorithm={"kl_coef": 0.1, "minibatches": 2})
        script = Script()
        async with pretended(config, script) as run:
            script.seconds = lambda happens, count: run.workers.lose(1) or 5.0 if happens == name else 0.0
            if name == "ClearDataCache":
                script.seconds = lambda happens, count: 0.0
                script.fails = lambda happens, count: run.workers.lose(1) if happens == "actor_train" else None
            with pytest.raises(BaseExceptionGroup) as failure:
                await run.master.run()
            error = first_error(failure.value)
            assert isinstance(error, PeerLost)
            assert "model_worker/1 is gone" in str(error)

    virtually(work())


def test_late_gservers_get_the_served_weights_between_two_steps(tmp_path):
    """That weights do not change meanwhile is asserted by the pretended workers."""

    async def work():
        script = Script(
            tokens=lambda seq: 30, seconds=lasting(reading=4.0, Publish=4.0, actor_train=3.0, ClearDataCache=8.0)
        )
        config = configured(tmp_path, run={"total_train_steps": 12}, staleness={"max_staleness": 0})
        async with pretended(config, script) as run:
            training = asyncio.create_task(run.master.run())
            for second in range(3, 300, 7):
                run.manager.lacking.add(f"gserver/{second}")
                run.manager.wake()
                await asyncio.sleep(7.0)
            assert len(run.manager.lacking) < 5  # the others were sent weights meanwhile
            await training
            publications = run.workers.named("Publish")
            assert len([event for event in publications if event.call.resync]) > 10
            for one, another in itertools.pairwise(publications):
                assert one.end <= another.begin
                assert another.call.version == one.call.version + (not another.call.resync)

    virtually(work())


@pytest.mark.parametrize("over_age", ["mask", "wait", "drop"])
@pytest.mark.parametrize(
    "changed",
    [
        {"trainer": {"batch_groups": 1}},
        {"trainer": {"batch_groups": 7}, "algorithm": {"minibatches": 3}},
        {"trainer": {"batch_groups": 16, "data_parallel": 2}},
        {"staleness": {"max_staleness": 0}},
        {"trainer": {"batch_groups": 3}, "staleness": {"max_staleness": 5}},
    ],
    ids=str,
)
def test_a_run_goes_on_with_other_batches_and_bounds(tmp_path, changed, over_age):
    script = Script(tokens=lambda seq: 1 + seq % 9, rejects=lambda seq: seq % 11 == 3, slots=200)
    config = configured(tmp_path, trainer={"save_every": "5 steps", "save_at_end": False}, run={"total_train_steps": 7})
    _, begun = whole_run(config, script)
    settings = {section: dict(chosen) for section, chosen in changed.items()}
    settings["staleness"] = settings.get("staleness", {}) | {"over_age": over_age}
    settings["run"] = {"total_train_steps": 15, "resume_from": str(config.run_dir / "checkpoints" / "step-000005")}
    config = configured(tmp_path, **settings)
    before = flat(begun.steps[:5])
    groups, staleness = config.trainer.batch_groups, config.staleness.max_staleness

    async def work():
        async with pretended(config, script) as run:
            await asyncio.sleep(0.5)  # before the first token
            assert run.manager.ledger.running == (staleness + 1) * groups
            reason = await run.master.run()
            return reason, run

    reason, run = virtually(work())
    assert reason == "15 steps are done"
    assert [len(step) for step in run.steps] == [groups] * 10
    assert_exactly_once(run, before)
    assert all(age <= staleness for report in run.manager.reports for age in report.token_ages)
    if over_age == "wait":
        trained = flat(run.steps)
        given_up = run.manager.ledger.rejected
        assert trained == [seq for seq in range(max(trained) + 1) if seq not in {*given_up, *before}]
    lines = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 16))
    assert [line["seqs"] for line in lines] == begun.steps[:5] + run.steps


@pytest.mark.parametrize("busy_with", ["Initialize", "Generate", "ref_inf", "actor_train", "Publish", "Save"])
def test_a_master_that_is_asked_to_leave_saves_its_last_step_and_ends_the_run(tmp_path, busy_with):
    """The step under way is completed; a batch that is not there yet is not waited for."""

    async def work():
        script = Script(
            tokens=lambda seq: 500 if busy_with == "Generate" and seq >= 4 else 4,
            seconds=lasting(**{busy_with: 30.0}),
        )
        config = configured(
            tmp_path,
            run={"total_train_steps": 1000},
            algorithm={"kl_coef": 0.1},
            trainer={"save_every": "never"},
        )
        async with pretended(config, script) as run:
            training = asyncio.create_task(run.master.run())
            await asyncio.sleep(20.0)
            run.master.leave()
            reason = await training + await run.master.finish()
        return reason, run, clock()

    reason, run, seconds = virtually(work())
    made = len(run.steps)
    assert reason == f"stopped on request after step {made}"
    assert run.master.stopped
    assert seconds <= 20 + 2 * 30 + 1
    saved = [event.call.progress.policy_version for event in run.workers.named("Save")]
    assert saved == ([made] if made else [])
    assert (made > 0) == (busy_with not in ("Initialize", "ref_inf"))
    found = progress.checkpoints(run.config.run_dir)
    assert [folder.name for folder in found] == [f"step-{made:06d}"] * bool(made)
