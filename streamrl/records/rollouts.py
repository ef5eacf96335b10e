"""`rollouts/`: samples of a run's training data, with every token; their format and reader.

    run_dir/rollouts/rank-0/        groups that one data-parallel head kept
        000007.rows                 one row of fixed width for each response (`ROW`), after a line that describes it
        000007.zst                  two zstd frames for each group: `KeptGroup` as JSON without its arrays; its arrays
        000001-000004.rows, .zst    older segments, thinned out and merged
    run_dir/rollouts/rank-1/...     groups of the next data-parallel head

Files are only appended to, frames before the rows that point to them, and each start of a run begins a segment of its
own. So a torn end has no row yet, and no file has to be repaired. Segments are replaced as a whole when the disk budget
is used up: the oldest are thinned out first (`RolloutWriter`). docs/rollouts.md describes the format, with examples.

The rows of a million responses are an array in memory, so tables are sorted and filtered in a moment; texts and arrays
are read on demand.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
import re
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from streamrl.errors import UNDECODABLE, DataError
from streamrl.types import NO_VERSION

log = logging.getLogger(__name__)

FOLDER = "rollouts"
FORMAT = 1
"""Version of the format; it changes when old code cannot read new files. New columns and arrays do not change it."""
ROWS, FRAMES = ".rows", ".zst"
MOST_BYTES_OF_FRAME = 2**30
"""Most bytes in a decompressed frame; a larger frame is refused."""
EXCERPT = 160
"""Characters of prompt and response in a row of a table."""

TOKEN_USES = ("trained", "prompt", "environment", "elsewhere", "over_age", "weight_limit", "no_contrast")
"""Use of a token in the policy's loss; `KeptGroup.token_uses` has the index.

trained: it is in the loss. prompt: before the first token that the policy sampled. environment: between its turns, or
after them. elsewhere: sampled by the policy in this episode, and trained on in the trajectory that branched off before
this one. over_age: older than `staleness.max_staleness` versions. weight_limit: its behaviour weight was outside the
limits (`algorithm.behavior_weight_limit = "mask"`). no_contrast: there was nothing to learn, since all siblings had the
same score.
"""
TRAINED, PROMPT, ENVIRONMENT, ELSEWHERE, OVER_AGE, WEIGHT_LIMIT, NO_CONTRAST = range(len(TOKEN_USES))

ROW = np.dtype(
    [
        ("step", "<i4"),  # the policy version that the step made
        ("seq", "<i8"),  # the group's sequence number
        ("index", "<i4"),  # number of the response in its group
        ("episode", "<i4"),  # number of the response's episode
        ("time", "<f8"),  # time of the step, in seconds since the epoch
        ("reward", "<f4"),
        ("advantage", "<f4"),  # mean over sampled tokens
        ("length", "<i4"),  # sampled tokens
        ("tokens", "<i4"),  # all tokens, prompt included
        ("prompt_tokens", "<i4"),  # tokens that the siblings share
        ("turns", "<i4"),  # runs of sampled tokens
        ("special", "<i4"),  # sampled special tokens that do not end a response: `Response.text` lacks them
        ("masked", "<i4"),  # sampled tokens that are not in the loss
        ("age", "<i4"),  # age of the oldest sampled token, in versions
        ("age_mean", "<f4"),  # mean age of the sampled tokens
        ("logprob", "<f4"),  # mean behaviour log-probability of the sampled tokens
        ("entropy", "<f4"),  # mean over sampled tokens; NaN: unknown
        ("difference", "<f4"),  # mean |proximal - behaviour| log-probability; NaN: unknown
        ("difference_max", "<f4"),
        ("finish", "S12"),  # why it ended
        ("worker", "S12"),  # the rollout worker that made it
        ("gserver", "S12"),  # the gserver that its group was sent to
        ("place", "<i8"),  # position of the group's frames in the segment's file
        ("head_bytes", "<i4"),  # length of the first frame
        ("body_bytes", "<i4"),  # length of the second frame
    ]
)
"""A row of the index. Names that are longer than their column are cut; `KeptGroup` has them whole."""
_NAMES = ("finish", "worker", "gserver")
_NUMBERS = tuple(name for name in ROW.names or () if name not in (*_NAMES, "place", "head_bytes", "body_bytes"))

OF_RESPONSES: dict[str, str] = {"seqlens": "<i4", "rewards": "<f4", "episodes": "<i4"}
OF_TOKENS: dict[str, str] = {
    "input_ids": "<i4",
    "text_ends": "<i4",
    "behavior_logprobs": "<f4",
    "policy_versions": "<i4",
    "token_uses": "|u1",
}
MAY_LACK: dict[str, str] = {
    "advantages": "<f4",
    "proximal_logprobs": "<f4",
    "ref_logprobs": "<f4",
    "values": "<f4",
    "entropy": "<f4",
}
DTYPES = OF_RESPONSES | OF_TOKENS | MAY_LACK


# --- a group ---


class GroupFacts(msgspec.Struct, kw_only=True):
    """The description of a group: everything about it that is not an array."""

    step: int
    """The policy version that the step made."""
    seq: int
    time: float
    """Seconds since the epoch."""
    worker: str
    """The rollout worker that made the group; empty: unknown."""
    gserver: str = ""
    """The gserver that it was sent to last; empty: unknown."""
    prompt_length: int
    """Leading tokens that all responses share."""
    prompt_chars: int
    """Characters of the text of these tokens."""
    finish_reasons: list[str]
    """`[n]` why each response ended."""
    texts: list[str]
    """`[n]` all tokens of each response as text, special ones and the prompt included."""
    special: list[int] = []
    """`[n]` sampled special tokens that do not end a response; empty: unknown."""
    reward_parts: list[dict[str, float]] = []
    """Components of each episode's reward by name; empty: it has a single one."""
    scores: list[float] = []
    """Score of each episode if its answers are rewarded one by one; empty: the score is the reward."""


class KeptGroup(GroupFacts, kw_only=True):
    """One group as it was trained on. Arrays are of all responses one after another, as in `TrajectoryGroup`."""

    seqlens: NDArray[np.int32]
    """`[n]` tokens of each response."""
    rewards: NDArray[np.float32]
    """`[n]`."""
    episodes: NDArray[np.int32]
    """`[n]` the episode of each response, from 0."""
    input_ids: NDArray[np.int32]
    """`[tokens]`."""
    text_ends: NDArray[np.int32]
    """`[tokens]` characters of the response's text up to the end of the token. A token that ends in the middle of a
    character does not count it; the token that completes the character does."""
    behavior_logprobs: NDArray[np.float32]
    """`[tokens]` in nats; 0 where the policy did not sample."""
    policy_versions: NDArray[np.int32]
    """`[tokens]`; `NO_VERSION` where the policy did not sample."""
    token_uses: NDArray[np.uint8]
    """`[tokens]` index in `TOKEN_USES`."""
    advantages: NDArray[np.float32] | None = None
    """`[tokens]`; 0 where the policy did not sample."""
    proximal_logprobs: NDArray[np.float32] | None = None
    """`[tokens]` the trainer's log-probabilities under the policy at the start of the step (from `actor_inf`, or from
    the first forward pass); NaN where they were not computed. None: computed for no token."""
    ref_logprobs: NDArray[np.float32] | None = None
    """`[tokens]` under the reference policy; None: there is none."""
    values: NDArray[np.float32] | None = None
    """`[tokens]` the critic's values; None: there is no critic."""
    entropy: NDArray[np.float32] | None = None
    """`[tokens]` entropy of the policy's distribution in the training step's first forward pass, in nats; as
    `proximal_logprobs`."""

    @property
    def size(self) -> int:
        """Number of responses."""
        return len(self.seqlens)

    def bounds(self, index: int) -> tuple[int, int]:
        """Return where response `index` begins and ends in the arrays of tokens."""
        end = int(self.seqlens[: index + 1].sum())
        return end - int(self.seqlens[index]), end

    def pieces(self, index: int) -> list[str]:
        """Return the text of each token of response `index`; they add up to `texts[index]`."""
        first, end = self.bounds(index)
        text = self.texts[index]
        return [text[a:b] for a, b in pairwise([0, *self.text_ends[first:end].tolist()])]

    def turns(self, index: int) -> list[tuple[int, int]]:
        """Return the runs of tokens of response `index` that the policy sampled under this response, as ranges within
        it (first, last + 1)."""
        first, end = self.bounds(index)
        return _runs(self.policy_versions[first:end] != NO_VERSION)

    def branches(self) -> list[Branch]:
        """Return for each response its branch from the response of its episode with the longest common beginning."""
        return branches(self.input_ids, self.seqlens, self.episodes)


class Branch(NamedTuple):
    """How a response branches off another one of its episode."""

    parent: int
    """The response with which it shares its beginning; -1: it is the first of its episode."""
    shared: int
    """Leading tokens that the two have in common."""


def branches(input_ids: NDArray[np.int32], seqlens: NDArray[np.int32], episodes: NDArray[np.int32]) -> list[Branch]:
    """Return the tree of each episode: for each response the earlier one with most leading tokens in common."""
    ends = np.cumsum(seqlens).tolist()
    responses = [input_ids[a:b] for a, b in pairwise([0, *ends])]
    found: list[Branch] = []
    for index, own in enumerate(responses):
        best = Branch(-1, 0)
        for earlier in range(index):
            if episodes[earlier] == episodes[index] and (shared := _common(own, responses[earlier])) > best.shared:
                best = Branch(earlier, shared)
        found.append(best)
    return found


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _runs(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


# --- encoding ---


class Head(GroupFacts, kw_only=True):
    """The first frame of a group."""

    arrays: list[tuple[str, str, int]]
    """Contents of the second frame, in order: name, dtype, length. Numbers of several bytes are stored as byte planes,
    first all first bytes, then all second ones, and so on, which compresses better."""


_head_decoder = msgspec.json.Decoder(Head)


def _unshuffled(content: memoryview, dtype: np.dtype[Any]) -> NDArray[Any]:
    planes = np.frombuffer(content, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(dtype)


def rows_of(group: KeptGroup) -> NDArray[np.void]:
    """Return the rows of `group`, `[n]` of `ROW`, without the places of its frames."""
    rows = np.zeros(group.size, ROW)
    starts = np.cumsum(group.seqlens) - group.seqlens
    sampled = group.policy_versions != NO_VERSION
    lengths = np.add.reduceat(sampled, starts, dtype=np.int64)
    count = np.maximum(lengths, 1)

    def mean(values: NDArray[Any]) -> NDArray[Any]:
        return np.add.reduceat(np.where(sampled, values, 0), starts, dtype=np.float64) / count

    age = np.where(sampled, group.step - 1 - group.policy_versions, 0)
    begins = sampled & ~np.concatenate(([False], sampled[:-1]))
    begins[starts] = sampled[starts]
    unknown = np.full(group.size, np.nan)
    rows["step"], rows["seq"], rows["time"] = group.step, group.seq, group.time
    rows["index"], rows["episode"], rows["reward"] = np.arange(group.size), group.episodes, group.rewards
    rows["advantage"] = unknown if group.advantages is None else mean(group.advantages)
    rows["length"], rows["tokens"], rows["prompt_tokens"] = lengths, group.seqlens, group.prompt_length
    rows["turns"] = np.add.reduceat(begins, starts, dtype=np.int64)
    rows["special"] = group.special or 0
    rows["masked"] = np.add.reduceat(sampled & (group.token_uses != TRAINED), starts, dtype=np.int64)
    rows["age"], rows["age_mean"] = np.maximum.reduceat(age, starts), mean(age)
    rows["logprob"] = mean(group.behavior_logprobs)
    rows["entropy"] = unknown if group.entropy is None else mean(group.entropy)
    if group.proximal_logprobs is None:
        rows["difference"] = rows["difference_max"] = unknown
    else:
        difference = np.where(sampled, np.abs(group.proximal_logprobs - group.behavior_logprobs), 0)
        rows["difference"], rows["difference_max"] = mean(difference), np.maximum.reduceat(difference, starts)
    rows["finish"] = [cut_name(reason, "finish") for reason in group.finish_reasons]
    rows["worker"], rows["gserver"] = cut_name(group.worker, "worker"), cut_name(group.gserver, "gserver")
    return rows


def cut_name(name: str, column: str) -> bytes:
    """Return `name` in as many bytes as `column` has, without half a character at its end."""
    return name.encode()[: ROW[column].itemsize].decode(errors="ignore").encode()


def first_line(dtype: np.dtype[Any]) -> bytes:
    """Return the first line of a file of rows."""
    return json.dumps({"streamrl_rollouts": FORMAT, "row": dtype.descr}).encode() + b"\n"


def read_rows(
    file: Path, *, skip: int = 0, dtype: np.dtype[Any] | None = None
) -> tuple[NDArray[np.void], int, np.dtype[Any]]:
    """Return the complete rows of `file` after the first `skip` of them as `ROW`, the length of its first line, and the
    dtype that it describes.

    `dtype`: the returned dtype of an earlier call. Raises `DataError` for a file of a newer format, and `OSError`.
    """
    with file.open("rb") as opened:
        line = opened.readline(65536)
        own = dtype if dtype is not None else _described(line, file)
        begin = opened.seek(skip * own.itemsize, os.SEEK_CUR)  # beyond its end if it was truncated since
        left = max(0, os.fstat(opened.fileno()).st_size - begin)
        found = np.fromfile(opened, own, count=left // own.itemsize)
    if own == ROW:
        return found, len(line), own
    rows = np.zeros(len(found), ROW)
    for name in set(ROW.names or ()).intersection(own.names or ()):
        rows[name] = found[name]
    return rows, len(line), own


def _described(line: bytes, file: Path) -> np.dtype[Any]:
    try:
        facts = json.loads(line)
        found, dtype = facts["streamrl_rollouts"], np.dtype([(name, kind) for name, kind in facts["row"]])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: its first line does not describe rows of rollouts ({error!r})") from error
    if found != FORMAT:
        raise DataError(f"{file}: rollouts of format {found}; this version of streamrl reads {FORMAT}")
    return dtype


# --- segments ---


class SegmentName(NamedTuple):
    """The numbers of the first and the last original segment in a file."""

    first: int
    last: int

    def file(self, folder: Path, ending: str) -> Path:
        name = f"{self.first:06d}" if self.first == self.last else f"{self.first:06d}-{self.last:06d}"
        return folder / (name + ending)


_SEGMENT = re.compile(r"(\d{6,})(?:-(\d{6,}))?\.rows")


def segments_in(folder: Path) -> list[SegmentName]:
    """Return the names of the segments in `folder`, oldest first, without segments that another one has replaced."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.listdir(folder):
            if match := _SEGMENT.fullmatch(entry):
                found.append(SegmentName(int(match[1]), int(match[2] or match[1])))
    found.sort(key=lambda name: (name.first, -name.last))
    kept: list[SegmentName] = []
    for name in found:
        if not kept or name.first > kept[-1].last:
            kept.append(name)
    return kept


# --- reading ---


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One response in a table; figures as in `ROW`, but None instead of NaN."""

    step: int
    seq: int
    index: int
    episode: int
    time: float
    reward: float
    advantage: float | None
    length: int
    tokens: int
    prompt_tokens: int
    turns: int
    special: int
    masked: int
    age: int
    age_mean: float
    logprob: float
    entropy: float | None
    difference: float | None
    difference_max: float | None
    finish: str
    worker: str
    gserver: str
    prompt: str = ""
    """The last `EXCERPT` characters of the prompt."""
    response: str = ""
    """The first `EXCERPT` characters after the prompt."""


class RowsFound(msgspec.Struct, frozen=True):
    """Some of the rows that pass a filter."""

    total: int
    """Number of all rows that pass it."""
    rows: list[Rollout]


class Found(msgspec.Struct, frozen=True):
    """Results of a search so far."""

    rows: list[Rollout]
    """Newest first."""
    groups: int
    """Number of groups that were searched."""
    go_on: tuple[int, int] | None
    """Step and sequence number, for `search(..., before=go_on)`; None: all groups were searched."""


class _Loaded(msgspec.Struct):
    """The rows of a segment that have been read."""

    folder: Path
    name: SegmentName
    dtype: np.dtype[Any]
    rows: NDArray[np.void]
    stamp: tuple[int, int]
    """Size of the file of rows, and the time of its last change, in nanoseconds."""


class Rollouts:
    """The rollouts that a run has kept, readable during the run and after its end or crash. Not thread-safe.

    No method raises because a run is being written, thinned out or removed at the same time; `group` raises `DataError`
    if the requested group is gone or damaged.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._loaded: dict[tuple[str, SegmentName], _Loaded] = {}
        self._unreadable: set[Path] = set()
        self._rows: NDArray[np.void] | None = np.zeros(0, ROW)
        """The rows of all segments; None: they are concatenated at the next access."""
        self._orders: dict[tuple[str, bool, str], NDArray[np.intp]] = {}
        self._zstd = zstandard.ZstdDecompressor()
        self.refresh()

    def __len__(self) -> int:
        """Number of responses."""
        return sum(len(found.rows) for found in self._loaded.values())

    @property
    def rows(self) -> NDArray[np.void]:
        """`[responses]` of `ROW`: the figures of all responses, for computing with them; read-only."""
        if self._rows is None:
            self._rows = np.concatenate([found.rows for found in self._loaded.values()])
            first = 0
            for found in self._loaded.values():  # views, so that rows are in memory only once
                found.rows = self._rows[first : first + len(found.rows)]
                first += len(found.rows)
        return self._rows

    def refresh(self) -> bool:
        """Read new segments and rows, and forget removed ones; return whether there were any."""
        before = self._loaded
        present = {
            (rank, name): self._folder / rank for rank in self._ranks() for name in segments_in(self._folder / rank)
        }
        loaded = {}
        for key, folder in present.items():
            if (found := self._load(folder, key[1], before.get(key))) is not None:
                loaded[key] = found
        self._loaded = loaded
        changed = list(before) != list(loaded) or any(loaded[key].rows is not before[key].rows for key in loaded)
        if changed:
            self._rows = None if loaded else np.zeros(0, ROW)
            self._orders.clear()
        return changed

    def table(
        self,
        *,
        sort: str = "step",
        descending: bool = True,
        filter: str = "",
        offset: int = 0,
        limit: int = 50,
        texts: bool = True,
    ) -> RowsFound:
        """Return up to `limit` rows, from number `offset` on, of the rows that pass `filter`, sorted by a column.

        Rows with equal values are in the order of steps. `filter`: conditions such as `reward>=0.5 finish=length
        step>100`, all of which have to hold; names are compared exactly. `texts`: with excerpts of prompt and response.
        Raises `DataError` for a column or a condition that does not exist.
        """
        order = self._order(sort, descending, filter)
        return RowsFound(len(order), self._described(order[offset : offset + limit], texts=texts))

    def group(self, step: int, seq: int) -> KeptGroup:
        """Return group `seq` of `step` with all responses and their arrays; raises `DataError` if it is not there."""
        for attempt in (1, 2):
            positions = np.flatnonzero((self.rows["seq"] == seq) & (self.rows["step"] == step))
            if len(positions):
                try:
                    return self._read(int(positions[0]))
                except FileNotFoundError:  # thinned out since
                    pass
            if attempt == 1:
                self.refresh()
        raise DataError(
            f"{self._folder}: group {seq} of step {step} is not among the rollouts that were kept; it was not sampled "
            "(metrics.rollouts_per_step), or has been thinned out since (metrics.rollouts_mb)"
        )

    def search(
        self,
        text: str,
        *,
        filter: str = "",
        limit: int = 50,
        before: tuple[int, int] | None = None,
        seconds: float = 2.0,
    ) -> Found:
        """Return responses with `text` in prompt or response, in upper or lower case, newest first.

        Ends after `limit` responses or `seconds`, between two groups; `Found.go_on` is the position to continue from.
        Raises `DataError` as `table` does.
        """
        deadline = time.monotonic() + seconds
        wanted = text.casefold()
        chosen = self._order("step", True, filter)
        keys = self.rows[["step", "seq"]][chosen]
        if before is not None:
            chosen = chosen[(keys["step"] < before[0]) | ((keys["step"] == before[0]) & (keys["seq"] < before[1]))]
        groups = _groups_in(self.rows, chosen)
        found: list[Rollout] = []
        for number, positions in enumerate(groups, start=1):
            head = self._head_or_none(int(positions[0]))
            if head is not None:
                hits = [p for p in positions.tolist() if wanted in head.texts[self.rows["index"][p]].casefold()]
                found += [_rollout(self.rows[position], head) for position in hits]
            if number < len(groups) and (len(found) >= limit or time.monotonic() > deadline):
                last = self.rows[int(positions[0])]
                return Found(found, number, (int(last["step"]), int(last["seq"])))
        return Found(found, len(groups), None)

    def _ranks(self) -> list[str]:
        try:
            return sorted(entry for entry in os.listdir(self._folder) if entry.startswith("rank-"))
        except OSError:  # it does not exist yet, it was removed, or a file server has lost it
            return []

    def _load(self, folder: Path, name: SegmentName, before: _Loaded | None) -> _Loaded | None:
        """Return the segment with all of its rows; rows in `before` are not read again. None: gone or unreadable."""
        file = name.file(folder, ROWS)
        try:
            state = file.stat()
            stamp = state.st_size, state.st_mtime_ns
            if before is not None and stamp == before.stamp:
                return before
            if before is not None and len(before.rows):
                last, *_ = read_rows(file, skip=len(before.rows) - 1, dtype=before.dtype)
                # Else a resumed run has removed steps, and perhaps made another segment of this name since.
                if last[:1].tobytes() == before.rows[-1:].tobytes():
                    rows = np.concatenate((before.rows, last[1:])) if len(last) > 1 else before.rows
                    return msgspec.structs.replace(before, rows=rows, stamp=stamp)
            rows, _, dtype = read_rows(file)
            return _Loaded(folder, name, dtype, rows, stamp)
        except FileNotFoundError:
            return None
        except (OSError, DataError) as error:
            if file not in self._unreadable:
                log.warning("rollouts are left out: %s", error)
            self._unreadable.add(file)
            return None

    def _order(self, sort: str, descending: bool, filter: str) -> NDArray[np.intp]:
        key = (sort, descending, filter)
        if key not in self._orders:
            if sort not in (*_NUMBERS, *_NAMES):
                raise DataError(f"rollouts have no column {sort!r}; they have {', '.join((*_NUMBERS, *_NAMES))}")
            if len(self._orders) > 8:
                self._orders.clear()
            self._orders[key] = _sorted(self.rows, conditions(filter), sort=sort, descending=descending)
        return self._orders[key]

    def _described(self, positions: NDArray[np.intp], *, texts: bool) -> list[Rollout]:
        heads: dict[tuple[int, int], Head | None] = {}
        described = []
        for position in positions.tolist():
            row = self.rows[position]
            group = int(row["step"]), int(row["seq"])
            if texts and group not in heads:
                heads[group] = self._head_or_none(position)
            described.append(_rollout(row, heads.get(group)))
        return described

    def _head_or_none(self, position: int) -> Head | None:
        try:
            return self._head(position)
        except (OSError, DataError) as error:
            log.info("the text of a rollout cannot be read: %s", error)
            return None

    def _segment_of(self, position: int) -> _Loaded:
        for found in self._loaded.values():
            if position < len(found.rows):
                return found
            position -= len(found.rows)
        raise AssertionError("rows and segments are read together")

    def _head(self, position: int) -> Head:
        row = self.rows[position]
        found = self._segment_of(position)
        file = found.name.file(found.folder, FRAMES)
        content = _read_part(file, int(row["place"]), int(row["head_bytes"]))
        try:
            head = _head_decoder.decode(self._decompressed(content, file))
        except UNDECODABLE as error:
            raise DataError(f"{file}: a group's description cannot be read: {error}") from error
        if (head.step, head.seq) != (row["step"], row["seq"]) or row["index"] >= len(head.texts):
            raise DataError(f"{file}: at {row['place']} is another group than {row['seq']} of step {row['step']}")
        return head

    def _read(self, position: int) -> KeptGroup:
        row = self.rows[position]
        found = self._segment_of(position)
        file = found.name.file(found.folder, FRAMES)
        head = self._head(position)
        content = memoryview(
            self._decompressed(
                _read_part(file, int(row["place"]) + int(row["head_bytes"]), int(row["body_bytes"])), file
            )
        )
        arrays: dict[str, Any] = {}
        begin = 0
        try:
            for name, kind, length in head.arrays:
                dtype = np.dtype(kind)
                end = begin + length * dtype.itemsize
                if name in DTYPES:
                    arrays[name] = _unshuffled(content[begin:end], dtype)
                begin = end
            facts = {name: getattr(head, name) for name in Head.__struct_fields__ if name != "arrays"}
            return KeptGroup(**facts, **arrays)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{file}: the arrays of group {head.seq} of step {head.step} make no sense: {error}"
            ) from error

    def _decompressed(self, content: bytes, file: Path) -> bytes:
        try:
            if zstandard.frame_content_size(content) > MOST_BYTES_OF_FRAME:
                raise DataError(f"{file}: a frame of more than {MOST_BYTES_OF_FRAME} bytes")
            return self._zstd.decompress(content, max_output_size=MOST_BYTES_OF_FRAME)
        except zstandard.ZstdError as error:
            raise DataError(f"{file}: a frame is damaged: {error}") from error


def _read_part(file: Path, place: int, length: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(place)
        return opened.read(length)


def _rollout(row: np.void, head: Head | None) -> Rollout:
    numbers = {name: row[name].item() for name in _NUMBERS}
    known: dict[str, Any] = {name: None if value != value else value for name, value in numbers.items()}
    names = {name: row[name].decode(errors="replace") for name in _NAMES}
    prompt = response = ""
    if head is not None:
        text = head.texts[numbers["index"]]
        prompt = text[: head.prompt_chars][-EXCERPT:]
        response = text[head.prompt_chars :][:EXCERPT]
    return Rollout(**known, **names, prompt=prompt, response=response)


def _groups_in(rows: NDArray[np.void], positions: NDArray[np.intp]) -> list[NDArray[np.intp]]:
    """Return `positions` of rows in pieces of one group each, in descending order of step and sequence number."""
    if not len(positions):
        return []
    steps, seqs = rows["step"][positions], rows["seq"][positions]
    order = np.lexsort((positions, -seqs, -steps.astype(np.int64)))
    steps, seqs = steps[order], seqs[order]
    changes = np.flatnonzero((np.diff(steps) != 0) | (np.diff(seqs) != 0)) + 1
    return np.split(positions[order], changes)


# --- filters ---


class Condition(NamedTuple):
    """`column operator value`."""

    column: str
    operator: str
    value: float | str

    def holds(self, rows: NDArray[np.void]) -> NDArray[np.bool_]:
        """Return the mask `[rows]` of the rows for which it holds. NaN is unlike every number."""
        compare = _OPERATORS[self.operator]
        value = self.value.encode() if isinstance(self.value, str) else self.value
        return cast(NDArray[np.bool_], compare(rows[self.column], value))


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|!=|==|=|<|>)\s*([^\s,<>=!]+)(?:\s*,|\s+and\b|\s+|$)", re.IGNORECASE)


def conditions(filter: str) -> list[Condition]:
    """Return the conditions in `filter`, separated by spaces, commas or `and`; raises `DataError` for other text."""
    found = []
    rest = filter.strip()
    while rest:
        match = _CONDITION.match(rest)
        if match is None:
            raise DataError(f"filter {filter!r}: {rest!r} is no condition; write for example reward>=0.5 finish=length")
        column, compare, text = match[1], match[2].replace("==", "="), match[3]
        found.append(Condition(column, compare, _value(column, compare, text, filter)))
        rest = rest[match.end() :].strip()
    return found


def _value(column: str, compare: str, text: str, filter: str) -> float | str:
    if column in _NAMES:
        if compare not in ("=", "!="):
            raise DataError(f"filter {filter!r}: {column} is a name, which can only be = or != another")
        return cut_name(text, column).decode()
    if column not in _NUMBERS:
        raise DataError(
            f"filter {filter!r}: there is no column {column!r}; there are {', '.join((*_NUMBERS, *_NAMES))}"
        )
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"filter {filter!r}: {text!r} is not a number to compare {column} with") from error


def _sorted(rows: NDArray[np.void], wanted: Iterable[Condition], *, sort: str, descending: bool) -> NDArray[np.intp]:
    """Return the positions of the rows for which all of `wanted` hold, sorted. Rows that are equal in `sort` are in the
    order of steps, which `descending` reverses, too. NaN comes last."""
    keep = np.ones(len(rows), np.bool_)
    for condition in wanted:
        keep &= condition.holds(rows)
    positions = np.flatnonzero(keep)
    positions = positions[np.argsort(rows["step"][positions], kind="stable")]
    if descending:
        positions = positions[::-1]
    if sort == "step":
        return positions
    values = rows[sort][positions]
    if values.dtype.kind == "S":
        _, values = np.unique(values, return_inverse=True)
    if descending:
        values = -values
    return positions[np.argsort(values, kind="stable")]
