"""`rollouts/`: samples of a run's training data, with every token, as Parquet files; their columns and their reader.

    run_dir/rollouts/rank-0/000001.parquet      groups that one data-parallel head kept; one row for each response
    run_dir/rollouts/rank-0/000002.parquet      later groups; a file appears at once, and does not change
    run_dir/rollouts/rank-1/...                 groups of the next data-parallel head

Any Parquet reader can open the folder (docs/rollouts.md). `Rollouts` reads the figures of all responses into memory, so
that a million of them are sorted and filtered in a moment; texts and arrays are read on demand.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from streamrl.errors import DataError
from streamrl.types import NO_VERSION

log = logging.getLogger(__name__)

FOLDER = "rollouts"
FORMAT_KEY, FORMAT = b"streamrl_rollouts", b"2"
"""Entry of a file's metadata, and the version of the format. It changes when old code cannot read new files. New
columns do not change it."""
EXCERPT = 160
"""Characters of prompt and response in a row of a table."""
MOST_TEXTS = 32
"""Number of files whose texts stay in memory."""

TOKEN_USES = ("trained", "prompt", "environment", "elsewhere", "over_age", "weight_limit", "no_contrast")
"""Use of a token in the policy's loss; `KeptGroup.token_uses` has the index.

trained: it is in the loss. prompt: before the first token that the policy sampled. environment: between its turns, or
after them. elsewhere: sampled by the policy in this episode, and trained on in the trajectory that branched off before
this one. over_age: older than `staleness.max_staleness` versions. weight_limit: its behaviour weight was outside the
limits (`algorithm.behavior_weight_limit = "mask"`). no_contrast: there was nothing to learn, since all siblings had the
same score.
"""
TRAINED, PROMPT, ENVIRONMENT, ELSEWHERE, OVER_AGE, WEIGHT_LIMIT, NO_CONTRAST = range(len(TOKEN_USES))

NUMBERS: dict[str, pa.DataType] = {
    "step": pa.int32(),  # the policy version that the step made
    "seq": pa.int64(),  # the group's sequence number
    "index": pa.int32(),  # number of the response in its group
    "episode": pa.int32(),  # number of the response's episode
    "time": pa.float64(),  # time of the step, in seconds since the epoch
    "reward": pa.float32(),
    "advantage": pa.float32(),  # mean over sampled tokens
    "length": pa.int32(),  # sampled tokens
    "tokens": pa.int32(),  # all tokens, prompt included
    "prompt_tokens": pa.int32(),  # tokens that the siblings share
    "turns": pa.int32(),  # runs of sampled tokens
    "special": pa.int32(),  # sampled special tokens that do not end a response: `Response.text` lacks them
    "masked": pa.int32(),  # sampled tokens that are not in the loss
    "age": pa.int32(),  # age of the oldest sampled token, in versions
    "age_mean": pa.float32(),  # mean age of the sampled tokens
    "logprob": pa.float32(),  # mean behaviour log-probability of the sampled tokens
    "entropy": pa.float32(),  # mean over sampled tokens
    "difference": pa.float32(),  # mean |proximal - behaviour| log-probability
    "difference_max": pa.float32(),
}
"""Figures of a response; null if unknown."""
NAMES: dict[str, pa.DataType] = {
    "finish": pa.string(),  # why it ended
    "worker": pa.string(),  # the rollout worker that made it
    "gserver": pa.string(),  # the gserver that its group was sent to
}
TEXTS: dict[str, pa.DataType] = {"prompt": pa.string(), "response": pa.string()}
"""All tokens of a response as text, special ones included: the tokens that the siblings share, and the others."""
ARRAYS: dict[str, pa.DataType] = {
    "input_ids": pa.int32(),
    "text_ends": pa.int32(),
    "behavior_logprobs": pa.float32(),
    "policy_versions": pa.int32(),
    "token_uses": pa.uint8(),
    "advantages": pa.float32(),
    "proximal_logprobs": pa.float32(),
    "ref_logprobs": pa.float32(),
    "values": pa.float32(),
    "entropies": pa.float32(),
}
"""Lists with one value for each token; null if the group has none."""
SCHEMA = pa.schema(
    [
        *(NUMBERS | NAMES | TEXTS).items(),
        ("score", pa.float64()),
        ("reward_parts", pa.map_(pa.string(), pa.float64())),
        *((name, pa.list_(kind)) for name, kind in ARRAYS.items()),
    ],
    metadata={FORMAT_KEY: FORMAT},
)


# --- a group ---


class KeptGroup(msgspec.Struct, kw_only=True):
    """One group as it was trained on. Arrays are of all responses one after another, as in `TrajectoryGroup`."""

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
    """`[n]` components of the reward of each response's episode, by name; empty: it has a single one."""
    scores: list[float] = []
    """`[n]` score of each response's episode if its answers are rewarded one by one; empty: the score is the reward."""
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
    entropies: NDArray[np.float32] | None = None
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


# --- rows ---


def rows_of(group: KeptGroup) -> pa.RecordBatch:
    """Return `group` as rows of `SCHEMA`, one for each response."""
    offsets = pa.array(np.concatenate(([0], np.cumsum(group.seqlens))), pa.int32())
    columns: dict[str, Any] = _figures(group) | {
        "finish": group.finish_reasons,
        "worker": [group.worker] * group.size,
        "gserver": [group.gserver] * group.size,
        "prompt": [text[: group.prompt_chars] for text in group.texts],
        "response": [text[group.prompt_chars :] for text in group.texts],
        "score": group.scores or None,
        "reward_parts": [list(parts.items()) for parts in group.reward_parts] or None,
    }
    for name, kind in ARRAYS.items():
        values = getattr(group, name)
        columns[name] = None if values is None else pa.ListArray.from_arrays(offsets, pa.array(values, kind))
    return pa.RecordBatch.from_arrays([_column(columns[f.name], f.type, group.size) for f in SCHEMA], schema=SCHEMA)


def _column(values: Any, kind: pa.DataType, rows: int) -> pa.Array:
    if values is None:
        return pa.nulls(rows, kind)
    return values if isinstance(values, pa.Array) else pa.array(values, kind, from_pandas=True)  # NaN becomes null


def _figures(group: KeptGroup) -> dict[str, Any]:
    """Return the columns in `NUMBERS`; None if unknown."""
    starts = np.cumsum(group.seqlens) - group.seqlens
    sampled = group.policy_versions != NO_VERSION
    lengths = np.add.reduceat(sampled, starts, dtype=np.int64)

    def mean(values: NDArray[Any] | None) -> NDArray[Any] | None:
        if values is None:
            return None
        return np.add.reduceat(np.where(sampled, values, 0), starts, dtype=np.float64) / np.maximum(lengths, 1)

    age = np.where(sampled, group.step - 1 - group.policy_versions, 0)
    begins = sampled & ~np.concatenate(([False], sampled[:-1]))
    begins[starts] = sampled[starts]
    difference = None
    if group.proximal_logprobs is not None:
        difference = np.where(sampled, np.abs(group.proximal_logprobs - group.behavior_logprobs), 0)
    return {
        "step": np.full(group.size, group.step),
        "seq": np.full(group.size, group.seq),
        "index": np.arange(group.size),
        "episode": group.episodes,
        "time": np.full(group.size, group.time),
        "reward": group.rewards,
        "advantage": mean(group.advantages),
        "length": lengths,
        "tokens": group.seqlens,
        "prompt_tokens": np.full(group.size, group.prompt_length),
        "turns": np.add.reduceat(begins, starts, dtype=np.int64),
        "special": group.special or None,
        "masked": np.add.reduceat(sampled & (group.token_uses != TRAINED), starts, dtype=np.int64),
        "age": np.maximum.reduceat(age, starts),
        "age_mean": mean(age),
        "logprob": mean(group.behavior_logprobs),
        "entropy": mean(group.entropies),
        "difference": mean(difference),
        "difference_max": None if difference is None else np.maximum.reduceat(difference, starts),
    }


def group_of(rows: pa.Table) -> KeptGroup:
    """Return the group with these rows of `SCHEMA`."""
    facts = rows.select([name for name in SCHEMA.names if name not in ARRAYS]).to_pydict()
    arrays = {name: _flat(rows[name]) for name in ARRAYS}
    return KeptGroup(
        step=facts["step"][0],
        seq=facts["seq"][0],
        time=facts["time"][0],
        worker=facts["worker"][0],
        gserver=facts["gserver"][0],
        prompt_length=facts["prompt_tokens"][0],
        prompt_chars=len(facts["prompt"][0]),
        finish_reasons=facts["finish"],
        texts=[prompt + response for prompt, response in zip(facts["prompt"], facts["response"], strict=True)],
        special=_known(facts["special"]),
        reward_parts=[dict(parts) for parts in _known(facts["reward_parts"])],
        scores=_known(facts["score"]),
        seqlens=rows["tokens"].to_numpy(),
        rewards=rows["reward"].to_numpy(),
        episodes=rows["episode"].to_numpy(),
        **cast(dict[str, Any], arrays),
    )


def _known(values: list[Any]) -> list[Any]:
    return [] if values[0] is None else values


def _flat(column: pa.ChunkedArray) -> NDArray[Any] | None:
    """Return all values of a column of lists; None if it is null."""
    if column.null_count:
        return None
    values: NDArray[Any] = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return values


def numbered(folder: Path) -> dict[int, Path]:
    """Return the files of rows in one rank's `folder` by number, ascending; empty if there is no such folder. Raises
    `DataError` if it has files of the format before Parquet."""
    entries = _entries(folder)
    if any(name.endswith(".rows") for name in entries):
        raise DataError(
            f"{folder} has rollouts of an earlier version (*.rows, *.zst), which this version cannot read: move "
            f"{folder.parent} out of the run's folder, or remove it"
        )
    return dict(sorted((int(match[1]), folder / match[0]) for name in entries if (match := _FILE.fullmatch(name))))


def _entries(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # it does not exist yet, it was removed, or a file server has lost it
        return []


_FILE = re.compile(r"(\d{6,})\.parquet")


def read(file: Path, columns: Iterable[str] = SCHEMA.names) -> pa.Table:
    """Return `columns` of a file; those that it lacks are null. Raises `DataError` for a damaged file or one of another
    format, and `FileNotFoundError`."""
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            found = (opened.schema_arrow.metadata or {}).get(FORMAT_KEY, b"none").decode()
            if found != FORMAT.decode():
                raise DataError(f"{file}: rollouts of format {found}; this version of streamrl reads {FORMAT.decode()}")
            known = set(opened.schema_arrow.names)
            table = opened.read([name for name in columns if name in known], use_threads=False)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: damaged names
        raise DataError(f"{file}: rollouts cannot be read: {error}") from error
    kinds = [SCHEMA.field(name).type for name in columns]
    arrays = [table[n] if n in known else pa.nulls(len(table), k) for n, k in zip(columns, kinds, strict=True)]
    return pa.table(arrays, names=list(columns))


# --- reading ---

Row = dict[str, Any]
"""One response in a table: `NUMBERS` and `NAMES` (None: unknown), and under `prompt` and `response` the last `EXCERPT`
characters of the prompt and the first ones after it; empty if they cannot be read."""
_INDEX = [*NUMBERS, *NAMES]
_IDENTITY = ["step", "seq", "index"]


class FilteredRows(msgspec.Struct, frozen=True):
    """Some of the rows that pass a filter."""

    total: int
    """Number of all rows that pass it."""
    rows: list[Row]


class SearchResult(msgspec.Struct, frozen=True):
    """Results of a search so far."""

    rows: list[Row]
    """Newest first."""
    groups: int
    """Number of groups that were searched."""
    resume_at: tuple[int, int] | None
    """Step and sequence number, for `search(..., before=resume_at)`; None: all groups were searched."""


class _File(msgspec.Struct):
    """The figures in one file."""

    path: Path
    stamp: tuple[int, int, int]
    """Inode, size, and time of the last change in nanoseconds: a resumed run replaces files."""
    rows: pa.Table


class Rollouts:
    """The rollouts that a run has kept, readable during the run and after its end or crash. Not thread-safe.

    No method raises because a run writes or removes files at the same time; `group` raises `DataError` if the requested
    group is gone or damaged. All raise it for a folder in the format before Parquet.
    """

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._files: dict[Path, _File] = {}
        self._firsts = np.zeros(0, np.int64)
        """Position in `rows` of the first row of each file."""
        self._unreadable: set[Path] = set()
        self._orders: dict[tuple[str, bool, str], NDArray[np.intp]] = {}
        self._texts: dict[Path, pa.Table] = {}
        self.rows: pa.Table = SCHEMA.empty_table().select(_INDEX)
        """`[responses]` the figures of all responses, for computing with them; read-only."""
        self.refresh()

    def __len__(self) -> int:
        """Number of responses."""
        return len(self.rows)

    def refresh(self) -> bool:
        """Read new files, and forget removed ones; return whether there were any."""
        loaded = {}
        for rank in sorted(name for name in _entries(self._folder) if name.startswith("rank-")):
            for path in numbered(self._folder / rank).values():
                if (found := self._load(path)) is not None:
                    loaded[path] = found
        changed = list(self._files.values()) != list(loaded.values())
        if changed:
            self._files = loaded
            self.rows = pa.concat_tables([self.rows.slice(0, 0), *(file.rows for file in loaded.values())])
            self.rows = self.rows.combine_chunks()
            self._firsts = np.cumsum([0, *(len(file.rows) for file in loaded.values())])
            for file, first in zip(loaded.values(), self._firsts.tolist(), strict=False):
                file.rows = self.rows.slice(first, len(file.rows))  # rows are in memory only once
            self._orders.clear()
            self._texts.clear()
        return changed

    def _load(self, path: Path) -> _File | None:
        """Return the figures in a file, those in memory if it is unchanged. None: gone or unreadable."""
        try:
            state = path.stat()
            stamp = state.st_ino, state.st_size, state.st_mtime_ns
            before = self._files.get(path)
            if before is not None and stamp == before.stamp:
                return before
            return _File(path, stamp, read(path, _INDEX))
        except FileNotFoundError:
            return None
        except (OSError, DataError) as error:
            if path not in self._unreadable:
                log.warning("rollouts are left out: %s", error)
            self._unreadable.add(path)
            return None

    def table(
        self,
        *,
        sort: str = "step",
        descending: bool = True,
        filter: str = "",
        offset: int = 0,
        limit: int = 50,
        texts: bool = True,
    ) -> FilteredRows:
        """Return up to `limit` rows, from number `offset` on, of the rows that pass `filter`, sorted by a column.

        Rows with equal values are in the order of steps; unknown values come last. `filter`: conditions such as
        `reward>=0.5 finish=length step>100`, all of which have to hold; names are compared exactly. `texts`: with
        excerpts of prompt and response. Raises `DataError` for a column or a condition that does not exist.
        """
        order = self._order(sort, descending, filter)
        return FilteredRows(len(order), self._described(order[offset : offset + limit], texts=texts))

    def group(self, step: int, seq: int) -> KeptGroup:
        """Return group `seq` of `step` with all responses and their arrays; raises `DataError` if it is not there."""
        for _ in range(2):
            mask = pc.and_(pc.equal(self.rows["seq"], seq), pc.equal(self.rows["step"], step))
            positions = np.flatnonzero(mask.to_numpy())
            if len(positions):
                path, first = self._place(int(positions[0]))
                with contextlib.suppress(FileNotFoundError):
                    rows = read(path).slice(first, len(positions))
                    if rows["step"].unique().to_pylist() == [step] and rows["seq"].unique().to_pylist() == [seq]:
                        return group_of(rows)
            self.refresh()  # the file was removed or replaced since, or the group is new
        raise DataError(
            f"{self._folder}: group {seq} of step {step} is not among the rollouts that were kept; it was not sampled "
            "(metrics.rollouts_per_step), or was removed since (metrics.rollouts_mb)"
        )

    def search(
        self,
        text: str,
        *,
        filter: str = "",
        limit: int = 50,
        before: tuple[int, int] | None = None,
        seconds: float = 2.0,
    ) -> SearchResult:
        """Return responses with `text` in prompt or response, in upper or lower case, newest first.

        Ends after `limit` responses or `seconds`, between two groups; `resume_at` is the position to continue from.
        Raises `DataError` as `table` does.
        """
        deadline = time.monotonic() + seconds
        found: list[Row] = []
        hits: dict[Path, NDArray[np.bool_]] = {}
        groups = self._groups(self._order("step", True, filter), before)
        for number, positions in enumerate(groups, start=1):
            path, first = self._place(int(positions[0]))
            if path not in hits:
                hits[path] = self._matching(path, text)
            chosen = positions[hits[path][positions - positions[0] + first]]
            found += self._described(chosen, texts=True)
            if number < len(groups) and (len(found) >= limit or time.monotonic() > deadline):
                last = self._value("step", positions[0]), self._value("seq", positions[0])
                return SearchResult(found, number, last)
        return SearchResult(found, len(groups), None)

    def _matching(self, path: Path, text: str) -> NDArray[np.bool_]:
        """Return for each row of a file whether `text` is in its prompt or response."""
        texts = self._texts_of(path)
        if texts is None:
            return np.zeros(len(self._files[path].rows), np.bool_)
        whole = pc.binary_join_element_wise(texts["prompt"], texts["response"], "")
        mask: NDArray[np.bool_] = pc.match_substring(whole, text, ignore_case=True).to_numpy()
        return mask

    def _groups(self, positions: NDArray[np.intp], before: tuple[int, int] | None) -> list[NDArray[np.intp]]:
        """Return `positions` of rows in pieces of one group each, ascending, the newest group first; `before`: only
        groups before this step and sequence number."""
        positions = np.sort(positions)
        steps, seqs = (self.rows[name].to_numpy()[positions] for name in ("step", "seq"))
        order = np.lexsort((positions, -seqs, -steps.astype(np.int64)))
        if before is not None:
            earlier = (steps < before[0]) | ((steps == before[0]) & (seqs < before[1]))
            order = order[earlier[order]]
        if not len(order):
            return []
        steps, seqs = steps[order], seqs[order]
        return np.split(positions[order], np.flatnonzero((np.diff(steps) != 0) | (np.diff(seqs) != 0)) + 1)

    def _value(self, column: str, position: int) -> Any:
        return self.rows[column][int(position)].as_py()

    def _order(self, sort: str, descending: bool, filter: str) -> NDArray[np.intp]:
        key = (sort, descending, filter)
        if key not in self._orders:
            if sort not in _INDEX:
                raise DataError(f"rollouts have no column {sort!r}; they have {', '.join(_INDEX)}")
            if len(self._orders) > 8:
                self._orders.clear()
            self._orders[key] = _sorted(self.rows, filter, sort=sort, descending=descending)
        return self._orders[key]

    def _described(self, positions: NDArray[np.intp], *, texts: bool) -> list[Row]:
        rows: list[Row] = self.rows.take(positions).to_pylist()
        for row, position in zip(rows, positions.tolist(), strict=True):
            path, place = self._place(position)
            found = self._texts_of(path) if texts else None
            row["prompt"] = "" if found is None else found["prompt"][place].as_py()[-EXCERPT:]
            row["response"] = "" if found is None else found["response"][place].as_py()[:EXCERPT]
        return rows

    def _place(self, position: int) -> tuple[Path, int]:
        """Return the file of a row, and the row's number in it."""
        number = int(np.searchsorted(self._firsts, position, side="right")) - 1
        return list(self._files)[number], position - int(self._firsts[number])

    def _texts_of(self, path: Path) -> pa.Table | None:
        """Return the texts of a file's rows; None if it was removed or replaced since the last `refresh`."""
        if path not in self._texts:
            try:
                texts = read(path, [*_IDENTITY, *TEXTS])
            except (OSError, DataError) as error:
                log.info("the text of a rollout cannot be read: %s", error)
                return None
            if not texts.select(_IDENTITY).equals(self._files[path].rows.select(_IDENTITY)):
                return None
            while len(self._texts) >= MOST_TEXTS:
                del self._texts[next(iter(self._texts))]
            self._texts[path] = texts
        return self._texts[path]


# --- filters ---


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": pc.greater_equal,
    "<=": pc.less_equal,
    "!=": pc.not_equal,
    "=": pc.equal,
    ">": pc.greater,
    "<": pc.less,
}
_CONDITION = re.compile(r"\s*(\w+)\s*(>=|<=|!=|==|=|<|>)\s*([^\s,<>=!]+)(?:\s*,|\s+and\b|\s+|$)", re.IGNORECASE)


def passing(rows: pa.Table, filter: str) -> NDArray[np.bool_]:
    """Return the mask `[rows]` of the rows that pass `filter`: conditions such as `reward>=0.5`, separated by spaces,
    commas or `and`. An unknown value is unlike every other. Raises `DataError` for other text."""
    keep = np.ones(len(rows), np.bool_)
    rest = filter.strip()
    while rest:
        match = _CONDITION.match(rest)
        if match is None:
            raise DataError(f"filter {filter!r}: {rest!r} is no condition; write for example reward>=0.5 finish=length")
        column, compare, text = match[1], match[2].replace("==", "="), match[3]
        value = _value(column, compare, text, filter)
        keep &= pc.fill_null(_OPERATORS[compare](rows[column], value), compare == "!=").to_numpy()
        rest = rest[match.end() :].strip()
    return keep


def _value(column: str, compare: str, text: str, filter: str) -> float | str:
    if column in NAMES:
        if compare not in ("=", "!="):
            raise DataError(f"filter {filter!r}: {column} is a name, which can only be = or != another")
        return text
    if column not in NUMBERS:
        raise DataError(f"filter {filter!r}: there is no column {column!r}; there are {', '.join(_INDEX)}")
    try:
        return float(text)
    except ValueError as error:
        raise DataError(f"filter {filter!r}: {text!r} is not a number to compare {column} with") from error


def _sorted(rows: pa.Table, filter: str, *, sort: str, descending: bool) -> NDArray[np.intp]:
    """Return the positions of the rows that pass `filter`, sorted. Rows that are equal in `sort` are in the order of
    steps, which `descending` reverses, too. Unknown values come last."""
    positions = np.flatnonzero(passing(rows, filter))
    positions = positions[np.argsort(rows["step"].to_numpy()[positions], kind="stable")]
    if descending:
        positions = positions[::-1]
    if sort == "step":
        return positions
    column = pc.rank(rows[sort], tiebreaker="dense").cast(pa.int64()) if sort in NAMES else rows[sort]
    values = column.to_numpy()[positions]
    return positions[np.argsort(-values if descending else values, kind="stable")]
