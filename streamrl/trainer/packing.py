"""Micro-batches from groups: the tokens of a row, their attention mask, and the predicting positions.

Trajectories have common beginnings: a template or tool descriptions in all groups, the prompt in a group, and the
turns that an agent's episodes or calls share. So a row is a *trie*: a common beginning occurs once, and each token sees
the tokens on its own path. A token keeps its position in its own sequence, so the results equal those of separate
sequences, at a fraction of the work. `p p a a`, `p p b c c` and `p p b d d` make the row

    row             p  p  a  a  b  c  c  d  d
    position        0  1  2  3  2  3  4  3  4
    visible until   9  9  4  4  9  7  7  9  9

In this depth-first order, a token's descendants follow it without a gap. So one number defines the queries that see it:
all from the token itself up to the end of its descendants.

A micro-batch is one row of up to `max_tokens` tokens, without padding. Trajectories that do not even share their first
token follow one another in it: a forest. There are as few micro-batches as `max_tokens` allows, since each costs a
fixed time; on a GPU, the time of thousands of kernel launches.

Pure functions over numpy; the backend turns the arrays into tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.types import NO_EXPERT, TrajectoryGroup


class MicroBatch(msgspec.Struct):
    """Tokens computed together; arrays of the shape `[rows, length]`, and of `[predicted]` in the order of rows and
    columns. `pack` makes one row, in which the trees follow one another."""

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    visible_until: NDArray[np.int64]
    """The first later column that does not see the token."""
    row_index: NDArray[np.int64]
    column_index: NDArray[np.int64]
    """Row and column of the hidden state that predicts each sampled token. A state may predict several tokens: one of
    each trajectory that shares it."""
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

    def states(self) -> States:
        """Return the hidden states that predict, each once."""
        length = self.input_ids.shape[1]
        places, of_prediction = np.unique(self.row_index * length + self.column_index, return_inverse=True)
        return States(*np.divmod(places, length), of_prediction)


class States(NamedTuple):
    """The distinct hidden states that predict, in the order of rows and columns."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    """`[states]`."""
    of_prediction: NDArray[np.int64]
    """`[predicted]`: the state that predicts each token, in ascending order."""


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
    groups: Sequence[TrajectoryGroup], *, max_tokens: int, share_prefix: bool, positions: Positions = "sampled"
) -> list[MicroBatch]:
    """Lay out all `groups` in few micro-batches of at most `max_tokens` tokens.

    A single trajectory longer than `max_tokens` gets a micro-batch of its own. Without `share_prefix` each trajectory
    is a tree of its own.
    """
    paths = [path for index, group in enumerate(groups) for path in _paths(index, group)]
    paths = _sorted(paths) if share_prefix else sorted(paths, key=lambda path: -len(path.ids))
    return [_micro_batch(groups, together, positions) for together in _fitting(paths, max_tokens)]


def pack_apart(
    groups: Sequence[TrajectoryGroup], *, max_tokens: int, positions: Positions = "sampled"
) -> list[MicroBatch]:
    """Lay out all `groups` with one trajectory per row, for models whose layers would mix packed ones.

    Rows of similar length form a micro-batch of at most `max_tokens` tokens, padding at the end included.
    """
    paths = [path for index, group in enumerate(groups) for path in _paths(index, group)]
    micros: list[list[MicroBatch]] = []
    for path in sorted(paths, key=lambda path: -len(path.ids)):
        if not micros or (len(micros[-1]) + 1) * micros[-1][0].tokens > max_tokens:
            micros.append([])
        micros[-1].append(_micro_batch(groups, [path], positions))
    return [_below_one_another(rows) for rows in micros]


def _below_one_another(rows: Sequence[MicroBatch]) -> MicroBatch:
    """Return `rows`, of one row each and the longest first, as one micro-batch."""
    length = rows[0].tokens

    def joined(name: str) -> NDArray[np.int64]:
        return np.concatenate([getattr(row, name) for row in rows])

    return MicroBatch(
        input_ids=np.concatenate([np.pad(row.input_ids, ((0, 0), (0, length - row.tokens))) for row in rows]),
        position_ids=np.tile(np.arange(length), (len(rows), 1)),
        visible_until=np.full((len(rows), length), length),
        row_index=np.repeat(np.arange(len(rows)), [len(row.target_ids) for row in rows]),
        column_index=joined("column_index"),
        group_index=joined("group_index"),
        target_index=joined("target_index"),
        target_ids=joined("target_ids"),
    )


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

    group: int
    """Index in the given groups."""
    start: int
    """Its start in the group's packed arrays."""
    ids: NDArray[np.int32]
    """`[tokens]`."""
    shared: int = 0
    """Length of the common beginning with the previous path, in tokens."""


def _paths(index: int, group: TrajectoryGroup) -> list[_Path]:
    ends = np.cumsum(group.seqlens, dtype=np.int64)
    starts = (ends - group.seqlens).tolist()
    return [
        _Path(index, start, group.packed_input_ids[start:end]) for start, end in zip(starts, ends.tolist(), strict=True)
    ]


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


def _fitting(paths: Iterable[_Path], max_tokens: int) -> list[list[_Path]]:
    """Divide sorted `paths` among micro-batches: each goes where it adds the fewest tokens, and there where the least
    room is left (best fit). In the result, `shared` refers to the previous path of the same micro-batch."""
    filled: list[list[_Path]] = []
    room: list[int] = []  # tokens that still fit, by micro-batch
    shared: list[int] = []  # common beginning of the present path and the micro-batch's last one
    for path in paths:
        length = len(path.ids)
        shared = [min(before, path.shared) for before in shared]
        fits = [place for place in range(len(filled)) if length - shared[place] <= room[place]]
        if fits:
            place = min(fits, key=lambda place: (length - shared[place], room[place]))
        else:
            place = len(filled)
            filled.append([])
            room.append(max(max_tokens, length))
            shared.append(0)
        filled[place].append(path._replace(shared=shared[place]))
        room[place] -= length - shared[place]
        shared[place] = length
    return filled


def _micro_batch(groups: Sequence[TrajectoryGroup], paths: Sequence[_Path], positions: Positions) -> MicroBatch:
    """Return the tries of sorted `paths`: the tokens of each path that it does not share with the previous one."""
    length = sum(len(path.ids) - path.shared for path in paths)
    visible_until = np.full(length, length)
    input_ids, position_ids = np.empty(length, np.int64), np.empty(length, np.int64)
    predictions: list[tuple[NDArray[np.int64], ...]] = []  # for each path: columns, groups, targets, target ids
    routes = max(groups[path.group].routes for path in paths)
    routed_experts = np.full((length, routes), NO_EXPERT, np.uint8)
    columns = np.arange(0)  # columns of a path's tokens
    placed = 0
    for path in paths:
        group, end = groups[path.group], placed + len(path.ids) - path.shared
        visible_until[columns[path.shared :]] = placed  # the previous path branches off here
        columns = np.concatenate((columns[: path.shared], np.arange(placed, end)))
        input_ids[placed:end] = path.ids[path.shared :]
        position_ids[placed:end] = np.arange(path.shared, len(path.ids))
        if group.routes:
            own = slice(path.start + path.shared, path.start + len(path.ids))
            routed_experts[placed:end] = group.routed_experts[own]
        predictions.append(_predictions(path, group, columns, positions))
        placed = end
    column_index, group_index, target_index, target_ids = map(np.concatenate, zip(*predictions, strict=True))
    order = np.argsort(column_index, kind="stable")
    return MicroBatch(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        visible_until=visible_until[None],
        row_index=np.zeros_like(column_index),
        column_index=column_index[order],
        group_index=group_index[order],
        target_index=target_index[order],
        target_ids=target_ids[order],
        routed_experts=routed_experts[None] if routes else None,
    )


def _predictions(
    path: _Path, group: TrajectoryGroup, columns: NDArray[np.int64], positions: Positions
) -> tuple[NDArray[np.int64], ...]:
    """Return columns, groups, targets and target ids of a path's predictions, as in `MicroBatch`."""
    length = len(path.ids)
    if positions == "ends":
        targets = np.array([length - 1])
        predicting = targets
    else:
        targets = np.flatnonzero(group.packed_loss_mask[path.start : path.start + length])
        predicting = targets - 1
    ids = path.ids[targets].astype(np.int64)
    return columns[predicting], np.full_like(targets, path.group), path.start + targets, ids
