"""Finished episodes on disk, for any trainer: files of JSON lines and Parquet, and batches that a trainer acknowledges.

`FinishedEpisodes` owns `episodes.jsonl`, one line for each episode in the order of their ends; the line's index is the
episode's number. Invariants: an episode is on disk before its score is confirmed; it is in at most one batch at a time;
and it is in no batch after one with it was acknowledged, also after a restart.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import secrets
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.errors import UNDECODABLE, DataError
from streamrl.rollout.groups import shared_prefix
from streamrl.types import Trajectory, TrajectoryGroup

EPISODES, ACKNOWLEDGED = "episodes.jsonl", "acknowledged.jsonl"
PARQUET_SCHEMA = pa.schema(
    [
        ("number", pa.int64()),
        ("id", pa.string()),
        ("group", pa.string()),
        ("task", pa.string()),
        ("score", pa.float64()),
        ("metrics", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("policy_versions", pa.list_(pa.int32())),
        ("reward", pa.float64()),
        ("finish_reason", pa.string()),
        ("turns", pa.int32()),
    ]
)
"""One row for each trajectory; `task` and `metrics` are JSON."""


class TrajectoryRecord(msgspec.Struct, frozen=True):
    """A `Trajectory` of JSON types: `[tokens]` lists of prompts, sampled answers and feedback."""

    input_ids: list[int]
    loss_mask: list[bool]
    """True where the policy sampled the token."""
    behavior_logprobs: list[float]
    """Of the policy that sampled the token, in nats; 0 elsewhere."""
    policy_versions: list[int]
    """Of the policy that sampled the token; -1 elsewhere."""
    reward: float
    finish_reason: str
    turns: int = 1

    @classmethod
    def of(cls, trajectory: Trajectory) -> Self:
        """Return the record of `trajectory`, without experts."""
        arrays = {name: getattr(trajectory, name).tolist() for name in cls.__struct_fields__[:4]}
        return cls(**arrays, reward=trajectory.reward, finish_reason=trajectory.finish_reason, turns=trajectory.turns)

    def trajectory(self, *, score: float) -> Trajectory:
        """Return the trajectory of an episode with this `score`."""
        return Trajectory(
            input_ids=np.array(self.input_ids, np.int32),
            loss_mask=np.array(self.loss_mask, np.bool_),
            behavior_logprobs=np.array(self.behavior_logprobs, np.float32),
            policy_versions=np.array(self.policy_versions, np.int32),
            reward=self.reward,
            finish_reason=self.finish_reason,
            turns=self.turns,
            score=score,
        )


class EpisodeRecord(msgspec.Struct, frozen=True):
    """A finished episode."""

    number: int
    """Consecutive, from 0, in the order of the ends of episodes."""
    id: str
    """The id in the URLs of the episode."""
    group: str
    """As in `EpisodeRequest`."""
    task: dict[str, Any]
    score: float
    """The agent's score with its rewards of single answers."""
    metrics: dict[str, float]
    trajectories: list[TrajectoryRecord]
    """One for each leaf of the tree of conversations; each sampled token is under the loss in exactly one."""


class LeasedBatch(NamedTuple):
    """Episodes that a trainer has taken and not acknowledged yet."""

    until: float
    """End of the lease, on the monotonic clock."""
    numbers: list[int]


class FinishedEpisodes:
    """The finished episodes in one folder. All methods are called on one event loop."""

    def __init__(self, folder: Path, *, parquet_every: int = 0) -> None:
        """Open the folder, which is made if it does not exist. `parquet_every`: episodes in a Parquet file; 0: none.

        Raises `DataError` if its files have other content.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._parquet_every = parquet_every
        self._file = (folder / EPISODES).open("a+b", buffering=0)
        self._starts = array("q", _line_starts(self._file))
        """Offset of each line, and of the end."""
        self._acknowledgements = (folder / ACKNOWLEDGED).open("a+b", buffering=0)
        self._acknowledged: dict[str, list[int]] = _acknowledged(self._acknowledgements)
        done = set(itertools.chain.from_iterable(self._acknowledged.values()))
        self._ready = [number for number in range(len(self)) if number not in done]
        self._batches: dict[str, LeasedBatch] = {}
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of episodes in the file."""
        return len(self._starts) - 1

    def add(self, record: EpisodeRecord) -> None:
        """Store an episode, on disk when this returns; its number is set here."""
        number = len(self)
        line = msgspec.json.encode(msgspec.structs.replace(record, number=number)) + b"\n"
        _append(self._file, line)
        self._starts.append(self._starts[-1] + len(line))
        self._ready.append(number)
        self._arrived.set()
        if self._parquet_every and len(self) % self._parquet_every == 0:
            self._write_parquet(number)

    async def take(self, limit: int, *, lease_seconds: float, wait_seconds: float) -> tuple[str, list[EpisodeRecord]]:
        """Return up to `limit` episodes and the name of their batch; wait up to `wait_seconds` for the first one.

        If the batch is not acknowledged within `lease_seconds`, its episodes are in later batches again.
        """
        until = time.monotonic() + wait_seconds
        while True:
            self._end_leases()
            if self._ready or time.monotonic() >= until:
                break
            ends = [until, *(batch.until for batch in self._batches.values())]
            self._arrived.clear()
            try:
                async with asyncio.timeout(max(0.0, min(ends) - time.monotonic())):
                    await self._arrived.wait()
            except TimeoutError:
                continue
        numbers, self._ready = self._ready[:limit], self._ready[limit:]
        if not numbers:
            return "", []
        name = secrets.token_hex(8)
        self._batches[name] = LeasedBatch(time.monotonic() + lease_seconds, numbers)
        return name, [self._read(number) for number in numbers]

    def acknowledge(self, name: str) -> bool:
        """Note, on disk, that the batch has reached its trainer for good. Return False if its lease has ended, or it
        never was: the trainer must not use it then. A repeated call returns True."""
        self._end_leases()
        if name in self._acknowledged:
            return True
        batch = self._batches.pop(name, None)
        if batch is None:
            return False
        _append(self._acknowledgements, msgspec.json.encode((name, batch.numbers)) + b"\n")
        self._acknowledged[name] = batch.numbers
        return True

    def counts(self) -> dict[str, int]:
        """Return the numbers of finished, ready, leased and acknowledged episodes."""
        self._end_leases()
        return {
            "finished": len(self),
            "ready": len(self._ready),
            "leased": sum(len(batch.numbers) for batch in self._batches.values()),
            "acknowledged": sum(map(len, self._acknowledged.values())),
        }

    def close(self) -> None:
        """Write the last Parquet file, and close the files."""
        if self._parquet_every and len(self) % self._parquet_every:
            self._write_parquet(len(self) - 1)
        self._file.close()
        self._acknowledgements.close()

    def _end_leases(self) -> None:
        now = time.monotonic()
        for name in [name for name, batch in self._batches.items() if batch.until <= now]:
            self._ready = sorted([*self._ready, *self._batches.pop(name).numbers])

    def _read(self, number: int) -> EpisodeRecord:
        start, end = self._starts[number : number + 2]
        return msgspec.json.decode(os.pread(self._file.fileno(), end - start, start), type=EpisodeRecord)

    def _write_parquet(self, last: int) -> None:
        """Write the file that contains episode `last`, and replace an earlier one with fewer episodes."""
        first = last - last % self._parquet_every
        target = self._folder / f"episodes-{first:08d}.parquet"
        draft = target.with_suffix(".unfinished")
        draft.write_bytes(as_parquet([self._read(number) for number in range(first, last + 1)]))
        draft.rename(target)


def as_parquet(episodes: Sequence[EpisodeRecord]) -> bytes:
    """Return a Parquet file (`PARQUET_SCHEMA`)."""
    rows = []
    for episode in episodes:
        whole = msgspec.structs.asdict(episode)
        shared = {name: whole[name] for name in ("number", "id", "group", "score")}
        shared |= {name: msgspec.json.encode(whole[name]).decode() for name in ("task", "metrics")}
        rows += [shared | msgspec.structs.asdict(trajectory) for trajectory in episode.trajectories]
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema=PARQUET_SCHEMA), content, compression="zstd")
    return content.getvalue()


def groups_of(episodes: Sequence[EpisodeRecord], *, worker: str = "gateway") -> list[TrajectoryGroup]:
    """Return the episodes in groups of one name, as `TorchTrainer.train_step` takes them; an episode without a name is
    a group. A group's `seq` is the number of its first episode."""
    named: dict[str, list[EpisodeRecord]] = {}
    for episode in episodes:
        named.setdefault(episode.group or f"\0{episode.number}", []).append(episode)
    groups = []
    for members in named.values():
        found = [(place, t.trajectory(score=e.score)) for place, e in enumerate(members) for t in e.trajectories]
        trajectories = [trajectory for _, trajectory in found]
        groups.append(
            TrajectoryGroup.from_trajectories(
                seq=members[0].number,
                worker=worker,
                prompt_length=shared_prefix(trajectories),
                trajectories=trajectories,
                episodes=[place for place, _ in found],
            )
        )
    return groups


def _append(file: io.FileIO, line: bytes) -> None:
    """Write all of `line`, on disk when this returns; after an error the file is as it was."""
    size = os.fstat(file.fileno()).st_size
    try:
        if file.write(line) != len(line):
            raise OSError("the disk is full")
        os.fsync(file.fileno())
    except OSError as error:
        file.truncate(size)
        raise DataError(f"{file.name} cannot be written ({error}); make room, then repeat the request") from error


def _lines(file: io.FileIO) -> Iterator[bytes]:
    """Yield the complete lines of `file`; a line that a crash has cut off is removed."""
    file.seek(0)
    size = 0
    for line in io.BufferedReader(open(file.fileno(), "rb", buffering=0, closefd=False)):  # noqa: SIM115 (not closed)
        if line.endswith(b"\n"):
            size += len(line)
            yield line
    file.truncate(size)


def _line_starts(file: io.FileIO) -> list[int]:
    """Return the offset of each line and of the end; raises `DataError` if the first line is no episode."""
    starts = [0]
    for line in _lines(file):
        if len(starts) == 1:
            _decoded(line, EpisodeRecord, file)
        starts.append(starts[-1] + len(line))
    return starts


def _acknowledged(file: io.FileIO) -> dict[str, list[int]]:
    return dict(_decoded(line, tuple[str, list[int]], file) for line in _lines(file))


def _decoded(line: bytes, kind: Any, file: io.FileIO) -> Any:
    try:
        return msgspec.json.decode(line, type=kind)
    except UNDECODABLE as error:
        raise DataError(f"{file.name} is no file of finished episodes ({error}); choose another folder") from error
