"""The buffer: groups that the trainer holds, as indices over the ledger's table of groups.

A group's record (`ledger.Group`) has its metadata, its ready keys, and the holders of each key. A group enters with
`put_batch`; model function calls read it with `get_batch_for_rpc` and add keys with `amend_batch`; the training step
takes it with `take_batch`; it leaves as trained on (`trained_on`) or as too old (`dropping`).

Invariants: no group is read twice by the same MFC unless it is stored again; the prompt of a group that is too old
returns to the ledger only after all workers have discarded the group. The buffer contains no tensors, and no method
iterates over all groups. Changes are immediate; only waits are coroutines, and each change wakes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from streamrl.ledger import Group, Ledger, ReadyGroups, Selection
from streamrl.seqs import SeqQueue
from streamrl.trainer.graph import MFC, Graph
from streamrl.trainer.layout import Layout
from streamrl.trainer.redistributor import ArrayFacts, Transfer, deal, redistribute
from streamrl.types import ARRAY_FIELDS, ArrayField, SampleMeta
from streamrl.waits import Wakeup

STREAM_ARRAYS = {field.name: field for field in ARRAY_FIELDS}
"""The arrays that a group has on arrival. Arrays from model function calls are float32, with one item for each
token."""
NOBODY: frozenset[int] = frozenset()

Shares = list[list[int]]
"""Sequence numbers of each data-parallel rank."""


class AsyncIOSequenceBuffer:
    """The groups of `ledger` that the trainer holds."""

    def __init__(self, graph: Graph, ledger: Ledger) -> None:
        self._ledger = ledger
        self._batch_groups = ledger.groups_per_batch
        self._inputs = {mfc.name: mfc.inputs for mfc in graph.reading("arrivals")}
        self._needed = graph.arrival_keys
        self._stream_keys = graph.stream_keys
        self._held: dict[int, Group] = {}
        self._unread = {mfc: SeqQueue() for mfc in self._inputs}
        self._ready = ReadyGroups()
        self._changed = Wakeup()
        self.wake = self._changed.notify
        """Wakes all waits. Called after a change in state that a condition reads."""
        self.until = self._changed.until
        """Waits until a condition holds; it is checked after each change."""
        self.batch_awaited = False
        """Whether a call of `take_batch` waits for a training batch."""
        ledger.observers.append(self.wake)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, seq: int) -> bool:
        return seq in self._held

    @property
    def consumed(self) -> int:
        """Number of groups that were trained on or rejected."""
        return len(self._ledger.trained_seqs) + len(self._ledger.rejected)

    # --- groups enter, grow and leave ---

    def put_batch(self, metas: Iterable[SampleMeta]) -> list[SampleMeta]:
        """Enter groups that arrived at the DP heads in their metadata. A group that is held already is replaced, and
        its MFCs run again.

        Return the groups that were closed before they arrived: they are not entered, and their heads should discard
        them.
        """
        unwanted: list[SampleMeta] = []
        for meta in metas:
            if meta.seq in self._held:
                self._remove(meta.seq)
            group = self._ledger.accept(meta)
            if group is None:
                unwanted.append(meta)
                continue
            group.holders = dict.fromkeys(self._stream_keys, frozenset({meta.head}))
            self._held[meta.seq] = group
            self._grow(group, self._stream_keys)
        self.wake()
        return unwanted

    def amend_batch(
        self,
        keys: Iterable[str],
        shares: Shares,
        layout: Layout,
        *,
        rewards: Mapping[int, list[float]] | None = None,
    ) -> None:
        """Record that an MFC computed `keys` for the groups of `shares`, at the heads of `layout`. Groups that have
        left in the meantime are skipped.

        `rewards`: rewards of the trajectories by the group's sequence number, if the MFC computed rewards.
        """
        added = frozenset(keys)
        for data, seqs in enumerate(shares):
            given = dict.fromkeys(added, frozenset({layout.head(data)}))
            for seq in seqs:
                if (group := self._held.get(seq)) is None:
                    continue
                if rewards and seq in rewards:
                    group.meta = msgspec.structs.replace(_meta(group), rewards=rewards[seq], scores=[])
                group.holders = {**group.holders, **given}
                self._grow(group, added)
        self.wake()

    def trained_on(self, seqs: Iterable[int]) -> dict[int, list[int]]:
        """Close groups that were trained on; return the groups that each worker has to discard."""
        done = list(seqs)
        found = self._take_out(done)
        for seq in done:
            self._ledger.trained_on(seq)
        return found

    @contextmanager
    def dropping(self, seqs: Collection[int]) -> Iterator[dict[int, list[int]]]:
        """Return the prompts of groups that are too old to the ledger. The context gets the groups that each worker has
        to discard, and must end only after all workers have done so."""
        found = self._take_out(seqs)
        for seq in seqs:
            self._ledger.discarding(seq)
        yield found
        for seq in seqs:
            self._ledger.discarded(seq)

    def _take_out(self, seqs: Iterable[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for seq in seqs:
            group = self._remove(seq)
            for worker in sorted({_meta(group).head}.union(*group.holders.values())):
                found.setdefault(worker, []).append(seq)
        self.wake()
        return found

    def _grow(self, group: Group, added: frozenset[str]) -> None:
        """Add keys to `group`; it enters the queues of the MFCs whose last input is among them, and the ready groups if
        the last key that a batch needs is."""
        before, group.keys = group.keys, group.keys | added
        for mfc, inputs in self._inputs.items():
            if inputs <= group.keys and not inputs <= before:
                self._unread[mfc].add(group.seq)
        if self._needed <= group.keys and not self._needed <= before:
            self._ready.add(group.seq, _meta(group).oldest_version)

    def _remove(self, seq: int) -> Group:
        group = self._held.pop(seq)
        for unread in self._unread.values():
            unread.discard(seq)
        self._ready.discard(seq)
        return group

    # --- waits for groups ---

    def close(self) -> None:
        """Stop observing the ledger: another buffer observes it from now on."""
        self._ledger.observers.remove(self.wake)

    async def get_batch_for_rpc(self, mfc: MFC, *, batch: Sequence[SampleMeta] = ()) -> list[SampleMeta]:
        """Return the groups of the next call of `mfc`, once `mfc.groups` of them have all its inputs.

        An MFC on arrivals gets each group once, oldest first; without `mfc.groups`, all that are ready, from one to a
        training batch. It gets fewer than `mfc.groups` if a training batch is awaited and the buffer holds enough
        groups for it: no other group may arrive before that batch has been trained on. An MFC on batches gets the first
        `mfc.groups` of `batch`, its remaining groups; all of them without `mfc.groups` or if fewer are left.
        """
        if mfc.reads == "batch":
            part = [meta.seq for meta in batch[: mfc.groups]]
            await self.until(lambda: all(mfc.inputs <= self._held[seq].keys for seq in part))
            return self.metas(part)
        unread = self._unread[mfc.name]
        await self.until(lambda: len(unread) >= (mfc.groups or 1) or (len(unread) > 0 and self._holds_batch()))
        return self.metas(unread.pop(mfc.groups or self._batch_groups))

    def _holds_batch(self) -> bool:
        """Return whether a training batch is awaited, and enough groups for one are here, ready or not."""
        return self.batch_awaited and len(self._held) >= self._batch_groups

    async def take_batch(
        self, select: Callable[[ReadyGroups], Selection | None]
    ) -> tuple[list[SampleMeta], list[SampleMeta]]:
        """Return the next training batch, and groups to drop; waits until there is one of the two. Both are empty once
        `select` returns None.

        `select` receives the groups that all MFCs on arrivals have finished, and must not change them. Taken groups
        stay in the buffer until `trained_on`.
        """
        self.batch_awaited = True
        self.wake()
        try:
            while (selection := select(self._ready)) is not None:
                if selection.batch or selection.drop:
                    return self.metas(selection.batch), self.metas(selection.drop)
                await self._changed.sleep()
            return [], []
        finally:
            self.batch_awaited = False
            self.wake()

    def metas(self, seqs: Iterable[int]) -> list[SampleMeta]:
        """Return the metadata of held groups."""
        return [_meta(self._held[seq]) for seq in seqs]

    @property
    def ready(self) -> ReadyGroups:
        """Groups that can be part of a batch."""
        return self._ready

    # --- places of arrays ---

    def deal(self, seqs: Sequence[int], layout: Layout) -> Shares:
        """Divide groups among the data-parallel ranks of `layout`, balanced by tokens, and preferably to ranks that
        hold them."""
        if layout.data == 1:
            return [sorted(seqs)]
        metas = self.metas(seqs)
        heads = {head: data for data, head in enumerate(layout.heads)}
        return deal(
            {meta.seq: meta.tokens for meta in metas},
            ranks=layout.data,
            home={meta.seq: heads[meta.head] for meta in metas if meta.head in heads},
        )

    def bring(self, shares: Shares, keys: Iterable[str], layout: Layout) -> list[Transfer]:
        """Return the transfers after which each worker has `keys` of its data-parallel rank's share, and record them as
        done."""
        wanted: dict[tuple[int, str], list[int]] = {}
        holders: dict[tuple[int, str], frozenset[int]] = {}
        wanted_keys = sorted(keys)
        for data, seqs in enumerate(shares):
            members = layout.members(data)
            for seq in seqs:
                held = self._held[seq].holders
                for key in wanted_keys:
                    having = held.get(key, NOBODY)
                    if not having.issuperset(members):
                        wanted[seq, key], holders[seq, key] = members, having
        if not wanted:
            return []
        plan = redistribute((self._piece(*name) for name in wanted), holders=holders, wanted=wanted)
        for (seq, key), members in wanted.items():
            group = self._held[seq]
            group.holders = {**group.holders, key: holders[seq, key].union(members)}
        return plan

    def _piece(self, seq: int, key: str) -> ArrayFacts:
        meta = _meta(self._held[seq])
        if key == "packed_facts":
            return ArrayFacts(seq, key, "uint8", (meta.facts_bytes,))
        field = STREAM_ARRAYS.get(key, ArrayField(key, "<f4", "token"))
        length = field.length(size=meta.size, tokens=meta.tokens, routes=meta.routes)
        return ArrayFacts(seq, key, np.dtype(field.dtype).name, (length,))


def _meta(group: Group) -> SampleMeta:
    """Return the metadata of a held group."""
    assert group.meta is not None, f"seq {group.seq} is not held"
    return group.meta
