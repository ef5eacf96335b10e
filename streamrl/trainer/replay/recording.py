"""The record of a run (`run.record`): its training batches, kept so that a replay can train on them again.

    run_dir/record/from-000000/           one part for each start of the run: the policy version that it began with
        rank-0/part.json                  `RankRecording`: settings, first weights, environment that affects rounding
        rank-0/step-000001.parquet        `RecordedStep`: calls and data of rank 0 in the step that made version 1
        rank-0/stopped.txt                why later steps are missing, if any are
        rank-1/...                        of the next data-parallel head

Each data-parallel head writes its own groups in a separate thread; no recorded data passes through the master.
Invariants: the file of a step appears at once or not at all, and a rank's files have no gaps; a full or slow disk never
ends the run. Any Parquet reader can open the files (docs/replay.md).
"""

from __future__ import annotations

import base64
import hashlib
import logging
import shutil
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.disk import to_disk
from streamrl.errors import DataError
from streamrl.records.progress import UNFINISHED
from streamrl.trainer.calls import DataTransfer, Function, Hook, Inference, TrainReply, TrainStep
from streamrl.trainer.graph import ROLLOUT, Graph
from streamrl.trainer.layout import layout_of
from streamrl.transport.codec import ARRAYS, group_bytes
from streamrl.types import GroupFacts, TrajectoryGroup

if TYPE_CHECKING:
    from streamrl.trainer.worker.data import WorkerData

log = logging.getLogger(__name__)

FOLDER = "record"
FACTS = "part.json"
FORMAT = "5"
"""Version of the file format; changes when older files can no longer be read."""
MOST_ON_THEIR_WAY = 2
"""Maximal number of steps in the writing thread's queue; training waits before it adds another one."""
MOST_WAITING_BYTES = 64 * 2**20
"""Maximal size of arrays that wait for room on the disk, in bytes; above it the record ends for good."""
NOTE_BYTES = 512
"""Size of `stopped.txt` in bytes, reserved at the start: a full disk has no room for it later."""

HEADER, CHECKSUM, FORMAT_KEY = b"header", b"crc32", b"streamrl_record"
"""Entries of a file's metadata."""
FACTS_COLUMNS: dict[str, pa.DataType] = {
    "worker": pa.string(),
    "prompt_length": pa.int32(),
    "finish_reasons": pa.list_(pa.string()),
    "generation_seconds": pa.float64(),
    "scores": pa.list_(pa.float64()),
    "gserver": pa.string(),
    "reward_parts": pa.list_(pa.map_(pa.string(), pa.float64())),
    "retries": pa.int32(),
}
"""The columns of a group's `GroupFacts`; its arrays (`ARRAYS`) and `RecordedStep.given` have columns of lists."""

BatchCall = Inference | Function | TrainStep
"""A call on a training batch."""


class RankRecording(msgspec.Struct, frozen=True):
    """Facts that hold for all steps that one rank recorded between a start of the run and its end."""

    format: str
    begins_at: int
    """The policy version of the first weights."""
    rank: int
    """The model worker's index."""
    config: dict[str, Any]
    """The run's resolved configuration."""
    weights: dict[str, str]
    """Role → fingerprint of its first weights, for each trained role; written by rank 0."""
    environment: dict[str, str]
    """Facts that affect rounding (`device.rounding`) and the fingerprint of the source (`code`), by name."""

    def settings(self) -> Config:
        """Return `config`, checked; raises `ConfigError` if this version of streamrl does not accept it."""
        return configuration.from_dict(self.config, where="the configuration in the record")


class RecordedStep(msgspec.Struct):
    """One rank's part of one training step."""

    step: int
    """The policy version that the step made."""
    rank: int
    calls: list[BatchCall]
    """The rank's calls on the batch, in order, without data transfers."""
    answers: list[TrainReply]
    """The rank's reply to each `TrainStep` in `calls`, in order."""
    groups: list[TrajectoryGroup]
    """The groups that this rank trained on."""
    given: dict[str, list[NDArray[Any]]]
    """Key → for each group the array that a model function call computed before the step, such as `ref_logprobs` or the
    user's `advantages`: `[tokens]`, or `[size]` for `rewards`."""

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(map(group_bytes, self.groups)) + sum(
            int(array.nbytes) for arrays in self.given.values() for array in arrays
        )


class _Header(msgspec.Struct, frozen=True):
    """Content of a `RecordedStep` that is not in columns; base64 of msgpack in the file's metadata."""

    step: int
    rank: int
    calls: list[BatchCall]
    answers: list[TrainReply]


def write_step(file: Path, step: RecordedStep) -> None:
    """Write `step` as `file`, one row for each group; it appears at once. Raises `OSError`, and leaves no file, if that
    fails."""
    header = base64.b64encode(msgspec.msgpack.encode(_Header(step.step, step.rank, step.calls, step.answers)))
    arrays = {name: [getattr(group, name) for group in step.groups] for name in ARRAYS} | step.given
    joined = {name: _joined(values, ARRAYS.get(name, "<f4")) for name, values in arrays.items()}
    columns = {"seq": pa.array([group.seq for group in step.groups], pa.int64())}
    columns |= {name: _facts_column(name, kind, step.groups) for name, kind in FACTS_COLUMNS.items()}
    for name, values in arrays.items():
        ends = np.cumsum([0, *map(len, values)])
        columns[name] = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(joined[name]))
    checksum = _checksum(joined, header).encode()
    metadata = {FORMAT_KEY: FORMAT.encode(), HEADER: header, CHECKSUM: checksum}
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table(columns, metadata=metadata), sink, compression="zstd", write_page_checksum=True, write_statistics=False
    )
    _appear(file, sink.getvalue().to_pybytes())


def _facts_column(name: str, kind: pa.DataType, groups: Sequence[TrajectoryGroup]) -> pa.Array:
    values = [getattr(group, name) for group in groups]
    if name == "reward_parts":
        values = [[list(parts.items()) for parts in of_group] for of_group in values]
    return pa.array(values, kind)


def read_step(file: Path) -> RecordedStep:
    """Return the step that `write_step` wrote; raises `DataError`, which names `file`, unless the file is complete and
    intact."""
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            table = opened.read(use_threads=False)
    except (OSError, pa.ArrowException, ValueError) as error:
        raise DataError(f"{file}: the recorded step cannot be read: {error}") from error
    metadata = table.schema.metadata or {}
    found = metadata.get(FORMAT_KEY, b"none").decode()
    if found != FORMAT:
        raise DataError(f"{file}: a record of format {found}; this version of streamrl reads {FORMAT}")
    try:
        return _step_of(table, metadata)
    except (KeyError, ValueError, TypeError, pa.ArrowException, msgspec.MsgspecError) as error:
        raise DataError(f"{file}: the recorded step is damaged: {error}") from error


def _step_of(table: pa.Table, metadata: Mapping[bytes, bytes]) -> RecordedStep:
    """Raises `ValueError`, among others, if the checksum is not that of the content."""
    header = msgspec.msgpack.decode(base64.b64decode(metadata[HEADER]), type=_Header)
    arrays = {}
    joined = {}
    for name in table.column_names:
        if name != "seq" and name not in FACTS_COLUMNS:
            column = table[name].combine_chunks()
            if not pa.types.is_list(column.type):
                raise ValueError(f"the column {name!r} has no lists")
            joined[name] = column.flatten().to_numpy(zero_copy_only=False).copy()
            ends = np.cumsum(column.value_lengths().to_numpy())
            arrays[name] = np.split(joined[name], ends[:-1]) if len(ends) else []
    if metadata[CHECKSUM].decode() != _checksum(joined, metadata[HEADER]):
        raise ValueError("its bytes are not those that were written")
    facts = table.select(list(FACTS_COLUMNS)).to_pylist()
    groups = []
    for place, (seq, of_group) in enumerate(zip(table["seq"].to_pylist(), facts, strict=True)):
        of_group["reward_parts"] = [dict(parts) for parts in of_group["reward_parts"]]
        own = {name: arrays[name][place] for name in ARRAYS}
        groups.append(TrajectoryGroup.of(seq, GroupFacts(**of_group), own))
    given = {name: values for name, values in arrays.items() if name not in ARRAYS}
    return RecordedStep(header.step, header.rank, header.calls, header.answers, groups, given)


def _joined(arrays: Sequence[NDArray[Any]], kind: str) -> NDArray[Any]:
    dtype = np.dtype(kind)
    return np.concatenate(arrays, dtype=dtype) if arrays else np.zeros(0, dtype)


def _checksum(arrays: Mapping[str, NDArray[Any]], header: bytes) -> str:
    found = zlib.crc32(header)
    for name in sorted(arrays):
        found = zlib.crc32(np.ascontiguousarray(arrays[name]).view(np.uint8).data, zlib.crc32(name.encode(), found))
    return f"{found:08x}"


def _appear(file: Path, content: bytes) -> None:
    unfinished = file.with_name(file.name + UNFINISHED)
    try:
        unfinished.write_bytes(content)
        unfinished.rename(file)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def _step_name(step: int) -> str:
    return f"step-{step:06d}.parquet"


def _numbered(folder: Path, pattern: str) -> dict[int, Path]:
    """Return the entries of `folder` that match `pattern`, by the number after the dash in their names, ascending."""
    found = {}
    for path in folder.glob(pattern):
        number = path.name.partition("-")[2].partition(".")[0]
        if number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


class RecordWriter:
    """Writer of one rank's part of the record, step by step, with a thread of its own. No method raises `OSError`."""

    def __init__(self, run_dir: Path, part: RankRecording, *, warn_seconds: float, limit_seconds: float) -> None:
        """Remove the part of an earlier start from the same version, and begin a new one.

        `warn_seconds`, `limit_seconds`: how long training waits for a slow disk before a warning is logged, and before
        the record is given up.
        """
        self._folder = run_dir / FOLDER / f"from-{part.begins_at:06d}" / f"rank-{part.rank}"
        self._note = self._folder / "stopped.txt"
        self._warn, self._limit = warn_seconds, limit_seconds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="record")
        self._on_their_way: deque[Future[None]] = deque()
        self._waiting: deque[RecordedStep] = deque()
        """Steps that wait for room on the disk; used by the writing thread only."""
        self._written = deque([self._folder / FACTS])
        """Files that may not be on the disk yet, and could be lost with a loss of power."""
        self._over = False
        """Whether the record has ended for good; the run continues without it."""
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
            self._note.write_bytes(b" " * NOTE_BYTES)
            _appear(self._folder / FACTS, msgspec.json.format(msgspec.json.encode(part)))
        except OSError as error:
            self._give_up(f"there is no record: {self._folder} cannot be made ({error})")

    def keep(self, step: RecordedStep) -> None:
        """Queue `step` for writing. Waits only if `MOST_ON_THEIR_WAY` earlier steps are still in the queue."""
        while len(self._on_their_way) >= MOST_ON_THEIR_WAY and not self._over:
            try:
                self._wait_for(self._on_their_way[0])
            except TimeoutError:
                self._give_up(f"the record ends before step {step.step}: {self._folder} did not take a step in time")
            else:
                self._on_their_way.popleft()
        if not self._over:
            self._on_their_way.append(self._thread.submit(self._write, step))

    def to_disk(self) -> None:
        """Wait until the steps so far are on the disk, safe from a crash of the machine. Waits for at most half of
        `limit_seconds`, since other workers wait in the meantime, and not for steps for which the disk has no room.
        From any thread."""
        if wait(list(self._on_their_way), self._limit / 2).not_done:
            log.warning("the last steps of the record are not written yet: %s does not take them", self._folder)
        if self._over:
            return
        try:
            while self._written:
                to_disk(self._written[0])
                self._written.popleft()
            for folder in (self._folder, *list(self._folder.parents)[:3]):  # up to the run's folder: they hold names
                to_disk(folder)
        except OSError as error:  # tolerance point: the record never ends the run
            log.warning("the last steps of the record in %s may be lost with the machine: %s", self._folder, error)

    def close(self) -> None:
        """Wait until all steps that the disk has room for are written, for `limit_seconds` at most."""
        try:
            while self._on_their_way and not self._over:
                self._wait_for(self._on_their_way[0])
                self._on_their_way.popleft()
        except TimeoutError:
            log.error("the last steps of the record are not written: %s does not take them", self._folder)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _wait_for(self, written: Future[None]) -> None:
        try:
            written.result(min(self._warn, self._limit))
        except TimeoutError:
            log.warning("training waits for the record: %s has taken nothing for %g s", self._folder, self._warn)
            written.result(max(self._limit - self._warn, 0.0))

    def _write(self, step: RecordedStep) -> None:
        if self._over:
            return
        failed_before = bool(self._waiting)
        self._waiting.append(step)
        try:
            while self._waiting:
                file = self._folder / _step_name(self._waiting[0].step)
                write_step(file, self._waiting[0])
                self._written.append(file)
                self._waiting.popleft()
        except (OSError, pa.ArrowException) as error:  # tolerance point: a full disk must not end a run
            reason = f"step {self._waiting[0].step} cannot be written: {error}"
            if sum(waiting.nbytes for waiting in self._waiting) > MOST_WAITING_BYTES:
                self._waiting.clear()
                self._give_up(f"the record ends for good, {reason}")
            elif not failed_before:
                log.warning("the record in %s: %s; it waits, and the run continues", self._folder, reason)
            self._say_why(reason)
        else:
            if failed_before:
                log.warning("the record in %s is written again", self._folder)
                self._say_why("")

    def _give_up(self, reason: str) -> None:
        self._over = True
        log.error("%s; the run continues without", reason)

    def _say_why(self, reason: str) -> None:
        """Write `reason` into the reserved `stopped.txt` in place, which needs no more room."""
        try:
            with self._note.open("r+b") as file:
                file.write(reason.encode()[:NOTE_BYTES].ljust(NOTE_BYTES))
        except OSError as error:
            log.debug("%s: %s", self._note, error)


class Recorder:
    """Collector of one data-parallel head's calls on a training batch; queues the step for writing when it is over."""

    def __init__(self, graph: Graph, data: WorkerData, writer: RecordWriter, *, rank: int) -> None:
        self._on_batches = {mfc.name for mfc in graph.reading("batch")}
        self._trains = {mfc.name for mfc in graph.mfcs if mfc.interface == "train_step"}
        self._keys = kept_keys(graph)
        self._data = data
        self.writer = writer
        self._rank = rank
        self._calls: list[BatchCall] = []
        self._answers: list[TrainReply] = []
        self._groups: dict[int, TrajectoryGroup] = {}

    def note(self, call: BatchCall, answer: object) -> None:
        """Note `call`, which was carried out, with its reply. The groups of the call must still be held."""
        if call.mfc not in self._on_batches:
            return
        hooks: list[Hook] = [hook for hook in call.pre_hooks if not isinstance(hook, DataTransfer)]
        if isinstance(call, TrainStep):
            call = msgspec.structs.replace(call, kept=[])  # samples that the run keeps do not affect the computation
        self._calls.append(msgspec.structs.replace(call, pre_hooks=hooks))
        if not isinstance(call, TrainStep):
            return
        assert isinstance(answer, TrainReply)
        self._answers.append(msgspec.structs.replace(answer, compared=[]))
        for minibatch in call.minibatches:
            self._groups |= {seq: self._data.group(seq) for seq in minibatch.seqs if seq not in self._groups}
        if self._trains <= {done.mfc for done in self._calls}:
            self._end_step(call.policy_version + 1)

    def _end_step(self, step: int) -> None:
        given = {}
        for key in self._keys:
            arrays = [self._data.optional(seq, key) for seq in self._groups]
            present = [array for array in arrays if array is not None]
            if len(present) == len(arrays):
                given[key] = present
        self.writer.keep(RecordedStep(step, self._rank, self._calls, self._answers, list(self._groups.values()), given))
        self._calls, self._answers, self._groups = [], [], {}


def kept_keys(graph: Graph) -> list[str]:
    """Return the keys of the arrays that a record contains, and that a replay takes from it: results computed on groups
    as they arrived, and results of the user's functions. A replay computes the models' results on the batch again."""
    givers = [mfc for mfc in graph.mfcs if mfc.role != ROLLOUT and (mfc.reads == "arrivals" or mfc.function)]
    return sorted({key for mfc in givers for key in mfc.outputs} - {"rewards"})  # rewards are part of the group


def code() -> dict[str, str]:
    """Return the fingerprint of the source that computes a training step, for `RankRecording.environment`."""
    found = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        found.update(file.read_bytes())
    return {"code of streamrl.trainer": found.hexdigest()}


def cut(run_dir: Path, *, policy_version: int) -> None:
    """Cut the record of the run in `run_dir` back to `policy_version`: later steps are about to be made again."""
    for begins_at, part in _numbered(run_dir / FOLDER, "from-*").items():
        if begins_at >= policy_version:
            shutil.rmtree(part)
            continue
        for rank in _numbered(part, "rank-*").values():
            for step, file in _numbered(rank, "step-*.parquet").items():
                if step > policy_version:
                    file.unlink()


class PartOnDisk(msgspec.Struct, frozen=True):
    """A part of a record that exists on all ranks."""

    facts: list[RankRecording]
    """The facts of each data-parallel head, by rank."""
    folders: list[Path]
    """The folder of each data-parallel head, by rank."""
    last: int
    """The last step that all heads recorded; `begins_at` if there is none."""
    stopped: str
    """Why a rank could not write later steps; empty if none failed."""

    @property
    def begins_at(self) -> int:
        return self.facts[0].begins_at


class Recording(msgspec.Struct, frozen=True):
    """The record of a run, as `read_recording` returns it."""

    run_dir: Path
    parts: list[PartOnDisk]
    """One part for each start of the run, ascending; at least one."""

    def load(self, step: int) -> list[RecordedStep]:
        """Return each rank's `RecordedStep` of the step that made version `step`, by rank; raises `DataError` if a file
        is missing or damaged."""
        for part in self.parts:
            if part.begins_at < step <= part.last:
                return [self._load(folder / _step_name(step), step) for folder in part.folders]
        there = ", ".join(f"{part.begins_at + 1} to {part.last}" for part in self.parts if part.last > part.begins_at)
        raise DataError(f"{self.run_dir}: step {step} is not in the record, which has {there or 'no step'}")

    def _load(self, file: Path, step: int) -> RecordedStep:
        found = read_step(file)
        if found.step != step:
            raise DataError(f"{file}: this is step {found.step}; was it renamed?")
        return found


def read_recording(run_dir: Path) -> Recording:
    """Return the record in the folder of a run, without the arrays, which `Recording.load` reads.

    A start of the run that was killed, or met a full disk, before it could record anything leaves a part without facts;
    such a part is skipped. Raises `DataError` if there is no record, or if one of its files is missing or cannot be
    read.
    """
    folders = _numbered(run_dir / FOLDER, "from-*").values()
    parts = [_read_part(folder) for folder in folders if any(folder.glob(f"rank-*/{FACTS}"))]
    if not parts:
        raise DataError(f"{run_dir}: this run has no record of its training data; start runs with run.record=true")
    return Recording(run_dir, parts)


def _read_part(folder: Path) -> PartOnDisk:
    ranks = _numbered(folder, "rank-*")
    facts = [_read_facts(rank / FACTS) for rank in ranks.values()]
    heads = layout_of(facts[0].settings().trainer, "actor").heads if facts else [0]
    missing = [rank for rank in heads if rank not in ranks]
    if missing:
        raise DataError(f"{folder} lacks rank-{missing[0]}: is it on that rank's host? Bring all of them together here")
    lasts, stopped = [], []
    for number, rank in ranks.items():
        steps = list(_numbered(rank, "step-*.parquet"))
        lasts.append(facts[0].begins_at + len(steps))
        if steps and steps[-1] != lasts[-1]:
            lost = sorted(set(range(facts[0].begins_at + 1, steps[-1])) - set(steps))
            raise DataError(f"{rank}: the file of step {lost[0]} is missing, though there are later ones")
        if note := _read_note(rank / "stopped.txt"):
            stopped.append(f"rank {number}: {note}")
    return PartOnDisk(facts, list(ranks.values()), min(lasts), "; ".join(stopped))


def _read_facts(file: Path) -> RankRecording:
    try:
        part = msgspec.json.decode(file.read_bytes(), type=RankRecording)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: this part of the record cannot be read: {error}") from error
    if part.format != FORMAT:
        raise DataError(
            f"{file}: a record of format {part.format}; this version of streamrl reads {FORMAT}: replay it with the "
            "version that wrote it, or remove its folder"
        )
    return part


def _read_note(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
