"""The groups that a model worker can compute on: its own from the stream, and those that others sent it.

Owns the arrays that model function calls gave and those that arrived from other workers; a group
of its own stays in the StreamDataset until it is discarded here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamrl.stream_dataset import StreamDataset
from streamrl.trainer.calls import MOST_COMPARED, Sibling
from streamrl.trainer.redistributor import Plan, concerning, transfers
from streamrl.trainer.worker.transfers import ArrayStore, DataManager
from streamrl.types import NO_VERSION, TrajectoryGroup


class WorkerData:
    """What one worker holds."""

    def __init__(self, dataset: StreamDataset, *, rank: int) -> None:
        self._dataset = dataset
        self._rank = rank
        self._store = ArrayStore()
        self.manager: DataManager | None = None
        """Moves arrays between workers; None where there is only one."""

    def group(self, seq: int) -> TrajectoryGroup:
        """The group with what has been found out about its rewards; arrays that are not here are blank.

        Raises `TransferError` when not even its tokens are here.
        """
        own = self._dataset.find(seq)
        if own is not None:
            scored = self.optional(seq, "rewards")
            return own if scored is None else msgspec.structs.replace(own, rewards=scored)
        ids = self._store.get(seq, "packed_input_ids")
        seqlens = self._store.get(seq, "seqlens")
        tokens, size = len(ids), len(seqlens)
        return TrajectoryGroup(
            seq=seq,
            worker="",
            prompt_length=int(self._store.get(seq, "prompt_length")[0]),
            seqlens=seqlens,
            rewards=_or(self.optional(seq, "rewards"), np.zeros(size, np.float32)),
            packed_input_ids=ids,
            packed_loss_mask=self._store.get(seq, "packed_loss_mask"),
            packed_behavior_logprobs=_or(self.optional(seq, "packed_behavior_logprobs"), np.zeros(tokens, np.float32)),
            packed_policy_versions=_or(
                self.optional(seq, "packed_policy_versions"), np.full(tokens, NO_VERSION, np.int32)
            ),
            finish_reasons=[""] * size,
            episodes=self._store.get(seq, "episodes"),
            packed_routed_experts=_or(self.optional(seq, "packed_routed_experts"), np.zeros(0, np.uint8)),
        )

    def response(self, which: Sibling) -> tuple[list[int], list[int]]:
        """Prompt and response of a group that this worker received, and the positions of the first `MOST_COMPARED`
        sampled tokens, of which the last one ends it; both empty if the group is gone."""
        group = self._dataset.find(which.seq)
        if group is None:
            return [], []
        first, end = group.bounds(which.index)
        sampled = np.flatnonzero(group.packed_loss_mask[first:end])[:MOST_COMPARED].tolist()
        return group.packed_input_ids[first : first + sampled[-1] + 1].tolist(), sampled

    def put(self, seq: int, key: str, array: NDArray[Any]) -> None:
        """A model function call gave this."""
        self._store.put(seq, key, array)

    def get(self, seq: int, key: str) -> NDArray[Any]:
        """An array that a model function call gave, or one of the group's own."""
        if not self._store.has(seq, key):
            self._stage(seq, key)
        return self._store.get(seq, key)

    def optional(self, seq: int, key: str) -> NDArray[Any] | None:
        """What a model function call gave, or what was sent here; None if there is nothing."""
        return self._store.get(seq, key) if self._store.has(seq, key) else None

    def transfer(self, plan: Plan) -> None:
        """Send and receive what `plan` says of this worker; raises `TransferError` when a peer is late or gone."""
        if self.manager is None:
            return
        for step in concerning(plan, self._rank):
            for transfer in transfers(step):
                if transfer.source == self._rank:
                    for piece in transfer.pieces:
                        if not self._store.has(piece.seq, piece.key):
                            self._stage(piece.seq, piece.key)
        self.manager.execute(plan, self._store)

    def discard(self, seqs: Iterable[int], *, come_again: bool) -> None:
        """Let go of groups; see `StreamDataset.discard` for `come_again`."""
        gone = list(seqs)
        self._store.discard(gone)
        self._dataset.discard([seq for seq in gone if self._dataset.find(seq) is not None], forget=come_again)

    def close(self) -> None:
        if self.manager is not None:
            self.manager.close()

    def _stage(self, seq: int, key: str) -> None:
        """Have an array of a group of one's own at hand by name."""
        group = self._dataset.find(seq)
        if group is None:
            return
        if key == "prompt_length":
            self._store.put(seq, key, np.array([group.prompt_length], np.int32))
        elif key in type(group).__struct_fields__:
            self._store.put(seq, key, getattr(group, key))


def _or(array: NDArray[Any] | None, blank: NDArray[Any]) -> NDArray[Any]:
    return blank if array is None else array
