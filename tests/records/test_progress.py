"""Checkpoints, from which a run can continue, and the ledger that is restored from them."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import from_dict
from streamrl.errors import ConfigError
from streamrl.ledger import Ledger
from streamrl.records import lineage as lineages
from streamrl.records import progress
from streamrl.records.collapse import CollapseWatch, Health
from streamrl.records.evaluation import EVALUATIONS_FILE, EvaluationReport
from streamrl.records.lineage import Lineage
from streamrl.records.metrics import StepReport
from streamrl.records.progress import Progress
from streamrl.seqs import SeqSet
from streamrl.types import SampleMeta
from tests.evaluations import make_report
from tests.groups import make_group
from tests.runs import read_steps


def make_progress(version: int = 3, **more: object) -> Progress:
    settings: dict[str, object] = {"trained": [(0, 8)], "rejected": [], "prompts": "x"}
    return Progress(policy_version=version, **(settings | more))  # type: ignore[arg-type]


def save(run_dir: Path, name: str, made: Progress) -> Path:
    folder = run_dir / "checkpoints" / name
    folder.mkdir(parents=True)
    progress.write(folder, made)
    return folder


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_just_their_members(seqs: set[int]) -> None:
    members = SeqSet()
    for seq in seqs:
        members.add(seq)
    made = make_progress(trained=members.ranges())
    assert list(made.trained_seqs()) == sorted(seqs)
    assert made.groups_trained == len(seqs)
    assert made.trained == progress.ranges(seqs)
    given_up = make_progress(trained=[], rejected=progress.ranges(seqs))
    assert list(given_up.rejected_seqs()) == sorted(seqs)
    assert given_up.groups_consumed == len(seqs)
    assert all(a_end < b for (_, a_end), (b, _) in zip(made.trained, made.trained[1:], strict=False))


def test_the_latest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    assert progress.checkpoints(tmp_path) == []
    older = save(tmp_path, "step-000010", make_progress(10))
    os.utime(older, (1, 1))
    last = save(tmp_path, "final", make_progress(11))
    save(tmp_path, "step-000012.unfinished", make_progress(12))
    (tmp_path / "checkpoints" / "step-000013").mkdir()  # weights without the state of a run
    assert progress.checkpoints(tmp_path)[-1] == last
    assert progress.read(last) == make_progress(11)


def test_only_so_many_are_kept(tmp_path: Path) -> None:
    for version in (5, 10, 15, 20):
        save(tmp_path, f"step-{version:06d}", make_progress(version))
    save(tmp_path, "final", make_progress(20))
    spare = str(tmp_path / "checkpoints" / "step-000005")
    progress.prune(tmp_path / "checkpoints", keep=2, spare=spare)
    assert (tmp_path / "checkpoints" / "step-000005").exists()
    (tmp_path / "checkpoints" / "step-000025.unfinished").mkdir()
    progress.prune(tmp_path / "checkpoints", keep=2, spare=None)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["final", "step-000015", "step-000020"]


def test_a_checkpoint_that_was_being_removed_when_the_run_was_killed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (5, 10):
        (save(tmp_path, f"step-{version:06d}", make_progress(version)) / "model.safetensors").touch()

    def killed(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr("streamrl.records.progress.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        progress.prune(tmp_path / "checkpoints", keep=1, spare=None)
    monkeypatch.undo()
    assert [folder.name for folder in progress.checkpoints(tmp_path)] == ["step-000010"]
    progress.prune(tmp_path / "checkpoints", keep=1, spare=None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000010"]


def test_the_last_checkpoint_of_when_the_run_was_healthy_is_kept(tmp_path: Path) -> None:
    in_trouble = CollapseWatch(health=Health("warning", since=12, signs=["x"], turn=["y"]))
    for version, watch in ((5, CollapseWatch()), (10, CollapseWatch()), (15, in_trouble), (20, in_trouble)):
        os.utime(save(tmp_path, f"step-{version:06d}", make_progress(version, watch=watch)), (version, version))
    healthy = tmp_path / "checkpoints" / "step-000010"
    assert progress.last_healthy(tmp_path) == healthy
    progress.prune(tmp_path / "checkpoints", keep=1, spare=None)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000010", "step-000020"]
    assert progress.read(tmp_path / "checkpoints" / "step-000020").watch == in_trouble
    (healthy / "state" / "progress.json").write_text("{")
    assert progress.last_healthy(tmp_path) is None
    progress.prune(tmp_path / "checkpoints", keep=1, spare=None)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000020"]


def test_a_run_that_went_back_keeps_its_new_checkpoints(tmp_path: Path) -> None:
    for version in (20, 30, 40):
        save(tmp_path, f"step-{version:06d}", make_progress(version))
    lineages.begin(tmp_path, policy_version=20, parent=0, cause="a death", steps_reached=42)
    assert versions_of(tmp_path) == [20]
    save(tmp_path, "step-000024", make_progress(24, lineage=1))
    assert versions_of(tmp_path) == [20, 24]
    progress.prune(tmp_path / "checkpoints", keep=2, spare=None)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-000020", "step-000024"}


def test_a_run_goes_on_from_where_it_has_gone_back_to(tmp_path: Path) -> None:
    """Whichever checkpoint that was, also one that it had abandoned before, or another run's."""
    run = tmp_path / "run"
    folders = run / "checkpoints"
    prompts = progress.prompts_digest(from_dict({}))
    for version in (20, 30, 40):
        save(run, f"step-{version:06d}", make_progress(version, prompts=prompts))

    def begin(checkpoint: Path) -> list[int]:
        section = {"dir": str(tmp_path), "name": "run", "resume_from": str(checkpoint)}
        progress.begin_lineage(from_dict({"run": section}))
        return versions_of(run)

    assert begin(folders / "step-000040") == [20, 30, 40]
    assert begin(folders / "step-000020") == [20]
    save(run, "step-000024", make_progress(24, lineage=2, prompts=prompts))
    assert begin(folders / "step-000024") == [20, 24]
    assert begin(folders / "step-000040") == [20, 30, 40]
    assert begin(save(tmp_path / "other", "step-000050", make_progress(50, lineage=7, prompts=prompts))) == []
    assert lineages.read(run)[-1].number == 8


def versions_of(run_dir: Path) -> list[int]:
    return [progress.read(folder).policy_version for folder in progress.checkpoints(run_dir)]


def test_a_run_that_was_copied_goes_on_from_its_latest_checkpoint(tmp_path: Path) -> None:
    """Whatever times the copies of its folders have."""
    for reached_at, version in ((100.0, 8), (300.0, 10), (200.0, 9)):
        folder = save(tmp_path, f"step-{version:06d}", make_progress(version, reached_at=reached_at))
        os.utime(folder, (reached_at + version, 1000 - version))
    (save(tmp_path, "step-000011", make_progress(11)) / "state" / "progress.json").write_text("{")
    os.utime(tmp_path / "checkpoints" / "step-000011", (1, 1))
    versions = [int(folder.name[-2:]) for folder in progress.checkpoints(tmp_path)]
    assert versions == [8, 9, 10], "one that cannot be read is none"
    progress.prune(tmp_path / "checkpoints", keep=1, spare=None)
    assert progress.checkpoints(tmp_path) == [tmp_path / "checkpoints" / "step-000010"]


def test_the_type_of_answers_does_not_change_which_prompt_is_which() -> None:
    plain, typed, other = (
        progress.prompts_digest(from_dict({"data": data}))
        for data in ({}, {"answer_type": "as_is"}, {"answer_key": "solution"})
    )
    assert plain == typed != other
    assert plain == "a4240c6582c20feb"  # checkpoints of earlier versions have it


def test_a_checkpoint_of_other_prompts_is_refused(tmp_path: Path) -> None:
    config = from_dict({})
    good = save(tmp_path, "good", make_progress(prompts=progress.prompts_digest(config)))
    bad = save(tmp_path, "bad", make_progress(prompts="other"))

    def begin(folder: Path) -> Progress | None:
        run = msgspec.structs.replace(config.run, resume_from=str(folder))
        return progress.of_run(msgspec.structs.replace(config, run=run))

    assert progress.of_run(config) is None
    assert begin(good) == progress.read(good)
    with pytest.raises(ConfigError, match="sequence numbers mean other prompts"):
        begin(bad)
    with pytest.raises(ConfigError, match="no checkpoint that a run can continue from"):
        begin(tmp_path)
    (bad / "state" / "progress.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        begin(bad)


def test_a_data_file_may_be_moved_but_no_other_function_or_task_takes_its_place() -> None:
    def digest(**data: str) -> str:
        return progress.prompts_digest(from_dict({"data": data}))

    assert digest(source="jsonl", path="a.jsonl") == digest(source="jsonl", path="elsewhere/a.jsonl")
    assert digest(source="jsonl", path="a") != digest(source="parquet", path="a")
    assert digest(source="jsonl", path="a") != digest(source="jsonl", path="a", suffix="!")
    assert digest(path="chain_sum") != digest(path="gcd")
    assert digest(source="python", path="module:rows") != digest(source="python", path="module:others")


def test_records_go_back_to_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = [StepReport(step=n, time=float(n), metrics={}, token_ages={}) for n in range(1, 6)]
    lines = [msgspec.json.encode(report) + b"\n" for report in reports]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"step": 6, "ti')
    (tmp_path / "final.json").write_text("{}")
    on_disk: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: on_disk.append(os.fstat(descriptor).st_ino))
    progress.rewind(tmp_path, policy_version=3)
    assert on_disk == [(tmp_path / "metrics.jsonl").stat().st_ino], "before it took the place of what there was"
    assert read_steps(tmp_path) == reports[:3]
    assert not (tmp_path / "final.json").exists()
    progress.rewind(tmp_path / "nowhere", policy_version=3)


def test_evaluations_go_back_to_the_checkpoint_too(tmp_path: Path) -> None:
    """But for those in which a policy answered that will be another one."""
    reports = [make_report(1), make_report(2, newest_version=3), make_report(3, newest_version=4), make_report(5)]
    lines = b"".join(msgspec.json.encode(report) + b"\n" for report in reports)
    (tmp_path / EVALUATIONS_FILE).write_bytes(lines + b'{"policy_version": 1, "ti')
    progress.rewind(tmp_path, policy_version=3)
    left = (tmp_path / EVALUATIONS_FILE).read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=EvaluationReport) for line in left] == reports[:2]
    assert progress.evaluated(tmp_path, policy_version=2)
    assert not progress.evaluated(tmp_path, policy_version=3)
    assert not progress.evaluated(tmp_path / "nowhere", policy_version=3)


@given(
    before=st.integers(1, 5),
    batches=st.integers(0, 8),
    now=st.integers(1, 7),
    staleness=st.integers(0, 3),
    more=st.integers(0, 40),
    data=st.data(),
)
def test_batches_of_another_size_are_fed_to_the_last_and_never_more_than_staleness_allows(
    before: int, batches: int, now: int, staleness: int, more: int, data: st.DataObject
) -> None:
    """A run of batches of `before` groups is resumed with batches of `now`, and ends after so many `more` groups."""
    had = before * batches
    rejected = sorted(data.draw(st.sets(st.integers(0, had + 5), max_size=4)))
    trained = [seq for seq in range(had + 20) if seq not in rejected][:had]
    ledger = Ledger(groups_per_batch=now, max_staleness=staleness, lease_seconds=1)
    ledger.restore(Lineage(policy_version=batches), trained=trained, rejected=rejected)
    ledger.ends_after = had + len(rejected) + more
    closed, steps = had + len(rejected), 0
    held: list[int] = []
    while closed < ledger.ends_after:
        held += [group.seq for group in ledger.admit("w", 1000, now=0.0)]
        assert len(held) <= (staleness + 1) * now
        if held and data.draw(st.booleans(), label="reject"):
            assert ledger.reject(held.pop())
            closed += 1
            continue
        assert len(held) >= now, "the next batch can never be full"
        for seq in held[:now]:
            ledger.accept(SampleMeta.of(make_group(seq), head=0))
            ledger.trained_on(seq)
        del held[:now]
        closed += now
        steps += 1
        ledger.advance(batches + steps)
        assert ledger.trained == had + steps * now
    assert len(held) <= (staleness + 1) * now
    assert ledger.room == 0, "nothing starts that no batch needs"
