"""What a run keeps of its steps: written and read back, damaged, on a full or slow disk, and taken back."""

from __future__ import annotations

import errno
import math
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamrl.config import from_dict
from streamrl.errors import DataError
from streamrl.trainer.calls import (
    Function,
    Inference,
    MinibatchShare,
    Offload,
    ParamRealloc,
    Sibling,
    TrainReply,
    TrainStep,
)
from streamrl.trainer.replay import recording
from streamrl.trainer.replay.recording import (
    FORMAT,
    RankRecording,
    RecordedStep,
    RecordWriter,
    cut,
    read_recording,
    read_step,
    write_step,
)
from streamrl.transport.codec import ARRAYS
from tests.groups import groups, make_group

NO_ROOM = OSError(errno.ENOSPC, "No space left on device")


def trained(**figures: float) -> TrainReply:
    return TrainReply(0.25, 0.0, sums={"loss": 0.1, **figures}, maxima={"grad_norm": 1 / 3}, token_ages={0: 3, 4: 1})


def make_step(step: int = 1, *, rank: int = 0, seqs: tuple[int, ...] = (3, 7), answer: TrainReply | None = None):
    share = MinibatchShare(list(seqs), 12, 4)
    calls = [
        Inference("actor_inf", list(seqs), post_hooks=[Offload("ref")]),
        TrainStep("actor_train", step - 1, 0, [share], compared=Sibling(3, 1), post_hooks=[ParamRealloc("a", "b")]),
    ]
    made = [make_group(seq, version=step - 1, routes=4 * (seq == 7)) for seq in seqs]
    made[0].scores = [0.25] * made[0].size
    given = {"ref_logprobs": [np.arange(group.tokens, dtype=np.float32) for group in made]}
    return RecordedStep(step, rank, list(calls), [answer or trained()], made, given)


def make_part(folder: Path, *, begins_at: int = 0, rank: int = 0, **sections: dict[str, object]) -> RankRecording:
    config = from_dict({"run": {"dir": str(folder), "name": "run"}, "trainer": {"data_parallel": 1}, **sections})
    return RankRecording(FORMAT, begins_at, rank, msgspec.to_builtins(config), {"actor": "abc"}, {"processor": "x"})


def write_part(folder: Path, steps: range, *, rank: int = 0, **sections: dict[str, object]) -> Path:
    """A part of a run in `folder`; return the rank's folder."""
    part = make_part(folder, begins_at=steps.start - 1, rank=rank, **sections)
    writer = RecordWriter(folder / "run", part, warn_seconds=10, limit_seconds=30)
    for step in steps:
        writer.keep(make_step(step, rank=rank))
    writer.close()
    return folder / "run" / "record" / f"from-{steps.start - 1:06d}" / f"rank-{rank}"


def assert_same(found: RecordedStep, wanted: RecordedStep) -> None:
    assert (found.step, found.rank, found.calls) == (wanted.step, wanted.rank, wanted.calls)
    assert msgspec.json.encode(found.answers) == msgspec.json.encode(wanted.answers)
    assert [group.seq for group in found.groups] == [group.seq for group in wanted.groups]
    for mine, other in zip(found.groups, wanted.groups, strict=True):
        assert mine.facts == other.facts
        for name in ARRAYS:
            assert getattr(mine, name).dtype == getattr(other, name).dtype
            np.testing.assert_array_equal(getattr(mine, name), getattr(other, name))
    assert found.given.keys() == wanted.given.keys()
    for key, arrays in wanted.given.items():
        for mine_array, other_array in zip(found.given[key], arrays, strict=True):
            np.testing.assert_array_equal(mine_array, other_array)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_is_written_is_read_back(tmp_path: Path, data: st.DataObject) -> None:
    made = data.draw(st.lists(groups(), max_size=5, unique_by=lambda group: group.seq))
    figures = data.draw(st.dictionaries(st.text(max_size=8), st.floats(), max_size=4))
    random = np.random.default_rng(len(made))
    step = RecordedStep(
        step=data.draw(st.integers(1, 2**31)),
        rank=data.draw(st.integers(0, 99)),
        calls=[Function("mine", [group.seq for group in made]), TrainStep("actor_train", 0, 0, [])],
        answers=[TrainReply(0.0, 0.0, sums=figures, maxima=figures, token_ages={2: 1})],
        groups=made,
        given={key: [random.random(group.tokens).astype(np.float32) for group in made] for key in ("advantages", "x")},
    )
    file = tmp_path / "step"
    write_step(file, step)
    found = read_step(file)
    assert_same(found, step)
    for name, value in figures.items():
        now = found.answers[0].sums[name]
        assert now.hex() == value.hex() or (math.isnan(now) and math.isnan(value))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_no_damage_goes_unnoticed(tmp_path: Path, data: st.DataObject) -> None:
    file = tmp_path / "step-000001.parquet"
    step = make_step()
    write_step(file, step)
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans(), label="cut"):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    found = error = None
    try:
        found = read_step(file)
    except DataError as refused:
        error = refused
    if found is not None:  # a byte of the file's own header that says nothing, such as a space between its words
        assert_same(found, step)
    else:
        assert str(file) in str(error)


def test_a_column_with_a_damaged_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "step-000001.parquet"
    write_step(file, make_step())
    file.write_bytes(file.read_bytes().replace(b"prompt_length", b"qrompt_length"))
    with pytest.raises(DataError, match=r"step-000001\.parquet: the recorded step is damaged: .*qrompt_length"):
        read_step(file)


def test_a_record_has_the_steps_that_all_ranks_have(tmp_path: Path) -> None:
    """A run was killed: one rank wrote a step more, and was in the middle of another."""
    two = {"trainer": {"data_parallel": 2}}
    write_part(tmp_path, range(1, 5), rank=0, **two)
    other = write_part(tmp_path, range(1, 4), rank=1, **two)
    (other / "step-000004.parquet.unfinished").write_bytes(b"half")
    found = read_recording(tmp_path / "run")
    assert (found.parts[0].begins_at, found.parts[0].last) == (0, 3)
    steps = found.load(3)
    assert [(step.step, step.rank) for step in steps] == [(3, 0), (3, 1)]
    assert_same(steps[1], make_step(3, rank=1))
    with pytest.raises(DataError, match="step 4 is not in the record, which has 1 to 3"):
        found.load(4)


class Disk:
    """Takes files, or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.go_on = threading.Event()
        self.go_on.set()
        appear = recording._appear

        def write(file: Path, content: bytes) -> None:
            assert self.go_on.wait(60)
            if self.full:
                raise NO_ROOM
            appear(file, content)

        monkeypatch.setattr(recording, "_appear", write)


def test_a_disk_that_stays_full_ends_the_record_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch)
    monkeypatch.setattr(recording, "MOST_WAITING_BYTES", 2 * make_step().nbytes)
    writer = RecordWriter(tmp_path / "run", make_part(tmp_path), warn_seconds=10, limit_seconds=30)
    writer.keep(make_step(1))
    while writer._on_their_way:
        writer._on_their_way.popleft().result(30)
    disk.full = True
    for step in range(2, 8):
        writer.keep(make_step(step))
    while writer._on_their_way:
        writer._on_their_way.popleft().result(30)
    assert not writer._waiting, "what will never be written is not held"
    disk.full = False
    writer.keep(make_step(8))
    writer.close()
    found = read_recording(tmp_path / "run").parts[0]
    assert found.last == 1
    assert "step 2 cannot be written" in found.stopped
    assert "the record ends for good" in caplog.text


def test_a_resumed_run_takes_its_record_back_to_the_checkpoint(tmp_path: Path) -> None:
    write_part(tmp_path, range(1, 7))
    write_part(tmp_path, range(7, 9))
    cut(tmp_path / "run", policy_version=6)
    assert [(part.begins_at, part.last) for part in read_recording(tmp_path / "run").parts] == [(0, 6)]
    cut(tmp_path / "run", policy_version=4)
    write_part(tmp_path, range(5, 8))
    found = read_recording(tmp_path / "run")
    assert [(part.begins_at, part.last) for part in found.parts] == [(0, 4), (4, 7)]
    assert [found.load(step)[0].step for step in range(1, 8)] == list(range(1, 8))
    write_part(tmp_path, range(5, 6))  # from the same checkpoint once more
    assert [(part.begins_at, part.last) for part in read_recording(tmp_path / "run").parts] == [(0, 4), (4, 5)]
    cut(tmp_path / "nowhere", policy_version=4)
