"""Micro-batches from groups: what a row holds, who attends to whom, which position predicts what.

Siblings start with the same prompt, so a row is a *tree*: the prompt once, then the branches,
each of which sees the prompt and itself. A token keeps the position that it has in its own
sequence, so the numbers are those of separate sequences, at a fraction of the work:

    row        p p p p a a a b b b b c c
    branch     0 0 0 0 1 1 1 2 2 2 2 3 3
    position   0 1 2 3 4 5 6 4 5 6 7 4 5

Pure functions over numpy; the backend turns the arrays into tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.types import TrajectoryGroup

PADDING_BRANCH = -1
MAX_ROW_PADDING = 1 / 8
"""A row shorter than its micro-batch by more than this share opens a new micro-batch, ..."""
SMALL_MICROBATCH_TOKENS = 512
"""... unless that one is still smaller than this."""


class Row(msgspec.Struct):
    """A tree of siblings: arrays of the shape `[row_tokens]`, and of `[predicted]`."""

    group: int
    """Which of the given groups."""
    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    branch: NDArray[np.int64]
    """0: prompt; k: the row's k-th sibling."""
    predictors: NDArray[np.int64]
    """Positions in the row whose hidden state predicts something, by default a sampled token."""
    targets: NDArray[np.int64]
    """Index of that token in the group's packed arrays."""
    target_ids: NDArray[np.int64]
    """Its token id."""


class MicroBatch(msgspec.Struct):
    """Rows computed together; arrays of the shape `[rows, length]`, and of `[predicted]`."""

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    branch: NDArray[np.int64]
    """`PADDING_BRANCH` in the padding."""
    row_index: NDArray[np.int64]
    column_index: NDArray[np.int64]
    """Row and column of the hidden state that predicts each sampled token."""
    group_index: NDArray[np.int64]
    target_index: NDArray[np.int64]
    """Group, and index in its packed arrays, of each sampled token."""
    target_ids: NDArray[np.int64]
    """Its token id."""

    @property
    def branched(self) -> bool:
        """Whether any row has more than one branch; if not, plain causal attention is right."""
        return bool(self.branch.max() > 1)

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return self.input_ids.size


Positions = Literal["sampled", "ends"]
"""What is predicted: each sampled token, from the position before it; or something about each sibling as a whole,
from its last token."""


def pack(
    groups: Sequence[TrajectoryGroup],
    *,
    max_tokens: int,
    share_prefix: bool,
    hidden_size: int,
    positions: Positions = "sampled",
) -> list[MicroBatch]:
    """Lay out all `groups` in micro-batches of at most `max_tokens` tokens.

    A single sequence longer than `max_tokens` gets a micro-batch of its own. `hidden_size`
    weighs attention against the rest when siblings are spread over rows.
    """
    rows: list[Row] = []
    for index, group in enumerate(groups):
        siblings = _siblings_per_row(group, max_tokens, hidden_size) if share_prefix else 1
        rows += _rows(index, group, siblings, positions)
    rows.sort(key=lambda row: -len(row.input_ids))
    return [_stack(batch) for batch in _similar_rows(rows, max_tokens)]


def attention_mask(branch: NDArray[np.int64]) -> NDArray[np.bool_]:
    """`[rows, 1, length, length]`: True where a query (third axis) sees a key (fourth).

    Earlier tokens of the same branch and of the prompt; padding sees itself alone.
    """
    length = branch.shape[1]
    query, key = branch[:, :, None], branch[:, None, :]
    causal = np.tri(length, dtype=bool)
    visible = causal & ((query == key) | (key == 0)) & (query != PADDING_BRANCH)
    mask: NDArray[np.bool_] = (visible | np.eye(length, dtype=bool))[:, None]
    return mask


def _siblings_per_row(group: TrajectoryGroup, max_tokens: int, hidden_size: int) -> int:
    """How many siblings share a row: more save prompt tokens, but attend across each other in vain.

    For each token a layer costs about 24·hidden² for its matrices and 4·hidden·length for its
    attention, so a row costs `tokens · (1 + length / (6 · hidden))`.
    """
    responses = group.seqlens - group.prompt_length
    longest = group.prompt_length + np.cumsum(np.sort(responses)[::-1])
    best, best_cost = 1, float("inf")
    for siblings in range(1, group.size + 1):
        if siblings > 1 and longest[siblings - 1] > max_tokens:
            break
        length = group.prompt_length + siblings * float(responses.mean())
        cost = length * (1 + length / (6 * hidden_size)) / siblings
        if cost < best_cost:
            best, best_cost = siblings, cost
    return best


def _rows(index: int, group: TrajectoryGroup, siblings_per_row: int, positions: Positions) -> Iterator[Row]:
    ends = np.cumsum(group.seqlens, dtype=np.int64)
    starts = ends - group.seqlens
    prompt = group.prompt_length if siblings_per_row > 1 else 0
    for first in range(0, group.size, siblings_per_row):
        members = range(first, min(first + siblings_per_row, group.size))
        source = [np.arange(starts[first], starts[first] + prompt)]
        branch = [np.zeros(prompt, dtype=np.int64)]
        position = [np.arange(prompt)]
        predictors: list[NDArray[np.int64]] = []
        targets: list[NDArray[np.int64]] = []
        offset = prompt
        for number, sibling in enumerate(members, start=1):
            length = int(group.seqlens[sibling]) - prompt
            own = np.arange(starts[sibling] + prompt, ends[sibling])
            source.append(own)
            branch.append(np.full(length, number if prompt else 1))
            position.append(np.arange(prompt, prompt + length))
            if positions == "ends":
                predictors.append(np.array([offset + length - 1]))
                targets.append(own[-1:])
            else:
                sampled = np.flatnonzero(group.packed_loss_mask[own])
                before = offset + sampled - 1
                before[sampled == 0] = prompt - 1  # the first token of a branch follows the prompt
                predictors.append(before)
                targets.append(own[sampled])
            offset += length
        yield Row(
            group=index,
            input_ids=group.packed_input_ids[np.concatenate(source)].astype(np.int64),
            position_ids=np.concatenate(position),
            branch=np.concatenate(branch),
            predictors=np.concatenate(predictors),
            targets=np.concatenate(targets),
            target_ids=group.packed_input_ids[np.concatenate(targets)].astype(np.int64),
        )


def _similar_rows(rows: Sequence[Row], max_tokens: int) -> Iterator[list[Row]]:
    """Cut `rows`, longest first, into runs of at most `max_tokens` with little padding."""
    batch: list[Row] = []
    for row in rows:
        if batch:
            length = len(batch[0].input_ids)
            too_large = (len(batch) + 1) * length > max_tokens
            ragged = len(row.input_ids) < length * (1 - MAX_ROW_PADDING)
            if too_large or (ragged and len(batch) * length >= SMALL_MICROBATCH_TOKENS):
                yield batch
                batch = []
        batch.append(row)
    if batch:
        yield batch


def _stack(rows: Sequence[Row]) -> MicroBatch:
    shape = (len(rows), max(len(row.input_ids) for row in rows))
    input_ids = np.zeros(shape, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    branch = np.full(shape, PADDING_BRANCH, dtype=np.int64)
    for i, row in enumerate(rows):
        length = len(row.input_ids)
        input_ids[i, :length] = row.input_ids
        position_ids[i, :length] = row.position_ids
        branch[i, :length] = row.branch
    counts = [len(row.predictors) for row in rows]
    return MicroBatch(
        input_ids=input_ids,
        position_ids=position_ids,
        branch=branch,
        row_index=np.repeat(np.arange(len(rows)), counts),
        column_index=np.concatenate([row.predictors for row in rows]),
        group_index=np.repeat([row.group for row in rows], counts),
        target_index=np.concatenate([row.targets for row in rows]),
        target_ids=np.concatenate([row.target_ids for row in rows]),
    )
