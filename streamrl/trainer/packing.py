"""Micro-batches from groups: the tokens of a row, their attention mask, and the predicting positions.

Trajectories of a group have a common beginning: the prompt, and for agents the turns that episodes or calls share. So a
row is a *trie*: a common beginning occurs once, and each token sees the tokens on its own path. A token keeps its
position in its own sequence, so the results equal those of separate sequences, at a fraction of the work. `p p a a`,
`p p b c c` and `p p b d d` make the row

    row             p  p  a  a  b  c  c  d  d
    position        0  1  2  3  2  3  4  3  4
    visible until   9  9  4  4  9  7  7  9  9

In this depth-first order, a token's descendants follow it without a gap. So one number defines the queries that see it:
all from the token itself up to the end of its descendants.

Rows do not see each other, so a micro-batch is a sequence of rows of any length: a forest, without padding. There are
as few micro-batches as `max_tokens` allows, since each costs a fixed time; on a GPU, the time of thousands of kernel
launches.

Pure functions over numpy; the backend turns the arrays into tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.types import NO_EXPERT, TrajectoryGroup


class Row(msgspec.Struct):
    """A trie of trajectories with a common first token: arrays of the shape `[row_tokens]`, and of `[predicted]`."""

    group: int
    """Index in the given groups."""
    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    visible_until: NDArray[np.int64]
    """The first later position in the row that does not see the token."""
    predictors: NDArray[np.int64]
    """Positions in the row with a hidden state that predicts a token, by default a sampled one. A position may predict
    several tokens: one of each trajectory that shares it."""
    targets: NDArray[np.int64]
    """Index of the predicted token in the group's packed arrays."""
    target_ids: NDArray[np.int64]
    """The predicted token's id."""
    routed_experts: NDArray[np.uint8]
    """`[row_tokens, layers · top_k]`, or `[row_tokens, 0]`, as in `TrajectoryGroup`; a token that several trajectories
    share has the experts of the row's first such trajectory."""


class MicroBatch(msgspec.Struct):
    """Tokens computed together; arrays of the shape `[rows, length]`, and of `[predicted]`. `pack` makes one row, in
    which the trees follow one another."""

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    visible_until: NDArray[np.int64]
    """The first later column that does not see the token."""
    row_index: NDArray[np.int64]
    column_index: NDArray[np.int64]
    """Row and column of the hidden state that predicts each sampled token."""
    group_index: NDArray[np.int64]
    target_index: NDArray[np.int64]
    """Group of each sampled token, and its index in the group's packed arrays."""
    target_ids: NDArray[np.int64]
    """The sampled token's id."""
    routed_experts: NDArray[np.uint8] | None = None
    """`[rows, length, layers · top_k]`: the experts that computed each token in the engine, as in `TrajectoryGroup`;
    None if they are unknown for all tokens."""

    @property
    def branched(self) -> bool:
        """Whether plain causal attention would be wrong: a token of a row's first tree does not see all tokens before
        it, or a later tree of the row predicts something."""
        end = self.visible_until[:, :1]
        return bool((self.visible_until < end).any() or (self.column_index >= end[self.row_index, 0]).any())

    @property
    def tokens(self) -> int:
        """Number of computed tokens."""
        return self.input_ids.size


IDLE = MicroBatch(
    input_ids=np.zeros((1, 1), np.int64),
    position_ids=np.zeros((1, 1), np.int64),
    visible_until=np.ones((1, 1), np.int64),
    row_index=np.zeros(0, np.int64),
    column_index=np.zeros(0, np.int64),
    group_index=np.zeros(0, np.int64),
    target_index=np.zeros(0, np.int64),
    target_ids=np.zeros(0, np.int64),
)
"""A micro-batch without effect, for a rank that has none left while others compute layers that all ranks must run
together: layers that are sharded over the ranks, or with experts that are."""

Positions = Literal["sampled", "ends"]
"""The positions with used output: `sampled`, the position before each sampled token, which predicts it; `ends`, the
last token of each trajectory, for a value of the whole trajectory."""


def pack(
    groups: Sequence[TrajectoryGroup],
    *,
    max_tokens: int,
    share_prefix: bool,
    hidden_size: int,
    positions: Positions = "sampled",
) -> list[MicroBatch]:
    """Lay out all `groups` in as few micro-batches of at most `max_tokens` tokens as first-fit-decreasing finds.

    A single sequence longer than `max_tokens` gets a micro-batch of its own. `hidden_size` weighs attention against
    other computation when trajectories are divided into rows.
    """
    rows: list[Row] = []
    for index, group in enumerate(groups):
        paths = _paths(group)
        if share_prefix:
            together = _cheapest_rows(_sorted(paths), max_tokens, hidden_size)
        else:
            together = [[path] for path in paths]
        rows += [_row(index, group, paths, positions) for paths in together]
    return [_concatenated(together) for together in _fitting(rows, max_tokens)]


def attention_mask(visible_until: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return `[rows, 1, length, length]`: True where a query (third axis) sees a key (fourth).

    `visible_until` is defined as in `MicroBatch`. A token sees the tokens on its own path.
    """
    length = visible_until.shape[1]
    query = np.arange(length)[:, None]
    mask: NDArray[np.bool_] = np.tri(length, dtype=bool) & (query < visible_until[:, None, None])
    return mask


class _Path(NamedTuple):
    """A trajectory on its way through a trie."""

    start: int
    """Its start in the group's packed arrays."""
    ids: NDArray[np.int32]
    """`[tokens]`."""
    shared: int = 0
    """Length of the common beginning with the previous path, in tokens."""


def _paths(group: TrajectoryGroup) -> list[_Path]:
    ends = np.cumsum(group.seqlens, dtype=np.int64)
    starts = (ends - group.seqlens).tolist()
    return [_Path(start, group.packed_input_ids[start:end]) for start, end in zip(starts, ends.tolist(), strict=True)]


def _sorted(paths: Sequence[_Path]) -> list[_Path]:
    """Return `paths` in the order of their bytes: paths with a common beginning of any length are neighbours."""
    found: list[_Path] = []
    for path in sorted(paths, key=lambda path: path.ids.tobytes()):
        found.append(path._replace(shared=_in_common(found[-1].ids, path.ids) if found else 0))
    return found


def _in_common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return the length of the common beginning."""
    length = min(len(one), len(other))
    differs = np.append(one[:length] != other[:length], True)
    return int(differs.argmax())


def _cheapest_rows(paths: Sequence[_Path], max_tokens: int, hidden_size: int) -> list[list[_Path]]:
    """Divide sorted `paths` into the cheapest rows: larger rows share more tokens, but compute more masked attention.

    For each token a layer costs about 24·hidden² for its matrices and 4·hidden·length for its attention, so a row costs
    `tokens · (1 + length / (6 · hidden))`.
    """
    shared = np.array([path.shared for path in paths])
    own = np.array([len(path.ids) for path in paths]) - shared
    before = np.concatenate(([0], np.cumsum(own)))
    least = np.zeros(len(paths) + 1)  # cost of the rows of the first paths, by the number of paths
    firsts = []  # first path of the last of these rows
    for end in range(1, len(paths) + 1):
        tokens = shared[:end] + before[end] - before[:end]  # tokens of a row, by its first path
        cost = least[:end] + tokens * (1 + tokens / (6 * hidden_size))
        cost[:-1][tokens[:-1] > max_tokens] = np.inf
        firsts.append(int(cost.argmin()))
        least[end] = cost[firsts[-1]]
    rows: list[list[_Path]] = []
    end = len(paths)
    while end:
        first = firsts[end - 1]
        rows.append([paths[first]._replace(shared=0), *paths[first + 1 : end]])
        end = first
    return rows[::-1]


def _row(index: int, group: TrajectoryGroup, paths: Sequence[_Path], positions: Positions) -> Row:
    """Return the trie of sorted `paths`: the tokens of each path that it does not share with the previous one."""
    length = sum(len(path.ids) - path.shared for path in paths)
    visible_until = np.full(length, length)
    source: list[NDArray[np.int64]] = []
    position: list[NDArray[np.int64]] = []
    predictors: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    columns = np.arange(0)  # columns of a path's tokens
    placed = 0
    for path in paths:
        own = np.arange(path.shared, len(path.ids))
        visible_until[columns[path.shared :]] = placed  # the previous path branches off here
        columns = np.concatenate((columns[: path.shared], own + (placed - path.shared)))
        placed += len(own)
        source.append(path.start + own)
        position.append(own)
        if positions == "ends":
            predictors.append(columns[-1:])
            targets.append(np.array([path.start + len(path.ids) - 1]))
        else:
            sampled = np.flatnonzero(group.packed_loss_mask[path.start : path.start + len(path.ids)])
            predictors.append(columns[sampled - 1])
            targets.append(path.start + sampled)
    tokens = np.concatenate(source)
    return Row(
        group=index,
        input_ids=group.packed_input_ids[tokens].astype(np.int64),
        position_ids=np.concatenate(position),
        visible_until=visible_until,
        predictors=np.concatenate(predictors),
        targets=np.concatenate(targets),
        target_ids=group.packed_input_ids[np.concatenate(targets)].astype(np.int64),
        routed_experts=group.routed_experts[tokens],
    )


def _fitting(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Add each row, the longest first, to the first micro-batch with enough room (first-fit-decreasing)."""
    filled: list[list[Row]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda row: -len(row.input_ids)):
        length = len(row.input_ids)
        place = next((i for i, left in enumerate(room) if length <= left), len(room))
        if place == len(room):
            filled.append([])
            room.append(max_tokens)
        filled[place].append(row)
        room[place] -= length
    return filled


def _concatenated(rows: Sequence[Row]) -> MicroBatch:
    lengths = [len(row.input_ids) for row in rows]
    counts = [len(row.predictors) for row in rows]
    starts = np.cumsum([0, *lengths[:-1]])
    columns = np.concatenate([row.predictors for row in rows])
    width = max(row.routed_experts.shape[1] for row in rows)
    routed_experts = [row.routed_experts if row.routed_experts.size else _unknown(row, width) for row in rows]
    return MicroBatch(
        input_ids=np.concatenate([row.input_ids for row in rows])[None],
        position_ids=np.concatenate([row.position_ids for row in rows])[None],
        visible_until=(np.concatenate([row.visible_until for row in rows]) + np.repeat(starts, lengths))[None],
        row_index=np.zeros_like(columns),
        column_index=columns + np.repeat(starts, counts),
        group_index=np.repeat([row.group for row in rows], counts),
        target_index=np.concatenate([row.targets for row in rows]),
        target_ids=np.concatenate([row.target_ids for row in rows]),
        routed_experts=np.concatenate(routed_experts)[None] if width else None,
    )


def _unknown(row: Row, width: int) -> NDArray[np.uint8]:
    """Return `[row_tokens, width]` for `Row.routed_experts` of a row with no experts from the engine."""
    return np.full((len(row.input_ids), width), NO_EXPERT, dtype=np.uint8)
