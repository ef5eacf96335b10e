"""The master's view of the groups that its model workers hold: metadata and readiness, no tensors.

Each group is read once by each MFC: arrivals by `get_batch_for_rpc`, the training batch by
`take_batch`, oldest first. Waiting is event-driven: whoever changes the buffer wakes the waiters.
What is ready for whom is kept up to date as keys come, so nothing here looks through all groups.

Who holds which arrays: what the master knows of the data that its model workers have. Pure.

Groups arrive at DP heads; model function calls add arrays there; plans of the Redistributor bring
copies elsewhere. Everything about a group ends with `discard`.

How the master forms training batches: the ledger's selection over what the buffer holds.

Owns which sequence numbers were trained on and which were rejected, as far as the order
matters. Pure.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from streamrl.config import Config
from streamrl.ledger import HeldGroups, Selection, count_over_age, next_in_order, select_batch
from streamrl.seqs import SeqQueue
from streamrl.trainer.graph import Graph
from streamrl.trainer.layout import Layout
from streamrl.trainer.redistributor import Piece, Plan, deal, redistribute
from streamrl.types import SampleMeta

# --- buffer ---

log = logging.getLogger(__name__)

NO_KEYS: frozenset[str] = frozenset()


class Growth(NamedTuple):
    """What keys that are added to those that a group has make of it."""

    keys: frozenset[str]
    """All that it has now."""
    readable: tuple[str, ...]
    """MFCs whose inputs are complete only now."""
    completes: bool
    """Whether only now it can be part of a batch."""


class AsyncIOSequenceBuffer:
    """Groups by sequence number, with the keys that each one has."""

    def __init__(self, graph: Graph, *, wait_warning_seconds: float) -> None:
        self._warning_seconds = wait_warning_seconds
        self._inputs = {mfc.name: mfc.inputs for mfc in graph.reading("arrivals")}
        self._needed = graph.arrival_keys
        self._stream_keys = graph.stream_keys
        self._metas: dict[int, SampleMeta] = {}
        self._keys: dict[int, frozenset[str]] = {}
        self._unread = {mfc: SeqQueue() for mfc in self._inputs}
        self._complete = HeldGroups()
        self._growths: dict[tuple[frozenset[str], frozenset[str]], Growth] = {}
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._metas)

    def __contains__(self, seq: int) -> bool:
        return seq in self._metas

    async def put_batch(self, metas: Iterable[SampleMeta]) -> None:
        """Groups arrived. One that is held already takes the place of the old one, and is read again."""
        async with self._changed:
            for meta in metas:
                if meta.seq in self._metas:
                    self._forget(meta.seq)
                self._metas[meta.seq] = meta
                self._keys[meta.seq] = NO_KEYS
                self._grow(meta.seq, self._stream_keys)
            self._changed.notify_all()

    async def amend_batch(
        self, seqs: Iterable[int], keys: Iterable[str], *, rewards: Mapping[int, list[float]] | None = None
    ) -> None:
        """An MFC gave `keys` for groups; those discarded meanwhile are passed over.

        `rewards`: of each trajectory, by sequence number, where the MFC gave those.
        """
        added = frozenset(keys)
        async with self._changed:
            for seq in seqs:
                if seq in self._keys:
                    if rewards and seq in rewards:
                        self._metas[seq] = msgspec.structs.replace(self._metas[seq], rewards=rewards[seq])
                    self._grow(seq, added)
            self._changed.notify_all()

    async def discard(self, seqs: Iterable[int]) -> None:
        """Groups left the buffer: dropped, or trained on."""
        async with self._changed:
            for seq in seqs:
                self._forget(seq)
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, which is looked at whenever something changes."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def wake(self) -> None:
        """Something outside the buffer that waiters look at has changed."""
        async with self._changed:
            self._changed.notify_all()

    async def get_batch_for_rpc(self, mfc: str, *, limit: int) -> list[SampleMeta]:
        """Up to `limit` groups that `mfc` has not read and whose inputs are there, oldest first; waits for one."""
        unread = self._unread[mfc]
        async with self._changed:
            await self._changed.wait_for(lambda: len(unread))
            return self._pick(unread.pop(limit))

    async def take_batch(
        self, select: Callable[[HeldGroups], Selection], describe: Callable[[Selection], str]
    ) -> tuple[list[SampleMeta], list[SampleMeta]]:
        """The next training batch, and groups to drop; waits until there is one of the two.

        `select` sees the groups that all MFCs that read arrivals are through with, and must not change
        them. Taken groups stay in the buffer until `discard`. A wait past the warning time is logged as
        `describe` words it.
        """
        began = time.monotonic()
        async with self._changed:
            while True:
                selection = select(self._complete)
                if selection.batch or selection.drop:
                    return self._pick(selection.batch), self._pick(selection.drop)
                try:
                    async with asyncio.timeout(self._warning_seconds):
                        await self._changed.wait()
                except TimeoutError:
                    log.warning("%s, for %.0f s now", describe(selection), time.monotonic() - began)

    def _pick(self, seqs: Sequence[int]) -> list[SampleMeta]:
        return [self._metas[seq] for seq in seqs]

    def _grow(self, seq: int, added: frozenset[str]) -> None:
        before = self._keys[seq]
        growth = self._growths.get((before, added)) or self._find_growth(before, added)
        self._keys[seq] = growth.keys
        for mfc in growth.readable:
            self._unread[mfc].add(seq)
        if growth.completes:
            self._complete[seq] = self._metas[seq]

    def _find_growth(self, before: frozenset[str], added: frozenset[str]) -> Growth:
        """All groups grow in the same few ways, so each way is worked out once."""
        keys = before | added
        growth = Growth(
            keys,
            readable=tuple(mfc for mfc, inputs in self._inputs.items() if inputs <= keys and not inputs <= before),
            completes=self._needed <= keys and not self._needed <= before,
        )
        self._growths[before, added] = growth
        return growth

    def _forget(self, seq: int) -> None:
        del self._metas[seq], self._keys[seq]
        for unread in self._unread.values():
            unread.discard(seq)
        self._complete.pop(seq, None)


# --- holdings ---

STREAM_DTYPES = {
    "packed_input_ids": "int32",
    "packed_loss_mask": "bool",
    "packed_behavior_logprobs": "float32",
    "packed_policy_versions": "int32",
    "seqlens": "int32",
    "prompt_length": "int32",
    "rewards": "float32",
    "episodes": "int32",
}
"""Of the arrays that a group brings. Those that model function calls give are float32."""
OF_TRAJECTORIES = frozenset({"seqlens", "rewards", "episodes"})
"""Keys with one number for each trajectory; `prompt_length` has one for the group, all others one for each token."""

NOBODY: frozenset[int] = frozenset()

Shares = list[list[int]]
"""Sequence numbers of each data-parallel rank."""


class Holdings:
    """Which worker holds which array of which group."""

    def __init__(self, *, stream_keys: Iterable[str]) -> None:
        self._stream_keys = tuple(sorted(stream_keys))
        self._holders: dict[int, dict[str, set[int]]] = {}
        self._metas: dict[int, SampleMeta] = {}

    def arrived(self, metas: Iterable[SampleMeta]) -> None:
        """Groups are with the workers that their metadata name."""
        for meta in metas:
            self._metas[meta.seq] = meta
            self._holders[meta.seq] = {key: {meta.head} for key in self._stream_keys}

    def given(self, key: str, shares: Shares, layout: Layout) -> None:
        """A model function call gave `key` of these groups, at the heads of `layout`."""
        for data, seqs in enumerate(shares):
            for seq in seqs:
                self._holders[seq][key] = {layout.head(data)}

    def discard(self, seqs: Iterable[int]) -> dict[int, list[int]]:
        """Forget groups; answers which worker has to let go of which."""
        found: dict[int, list[int]] = {}
        for seq in seqs:
            for worker in sorted(set().union(*self._holders.pop(seq).values(), {self._metas.pop(seq).head})):
                found.setdefault(worker, []).append(seq)
        return found

    def deal(self, seqs: Sequence[int], layout: Layout) -> Shares:
        """Deal groups over the data-parallel ranks of `layout`, balanced by tokens, near to where they are."""
        if layout.data == 1:
            return [sorted(seqs)]
        costs = {seq: self._metas[seq].tokens for seq in seqs}
        heads = {head: data for data, head in enumerate(layout.heads)}
        home = {seq: heads[self._metas[seq].head] for seq in seqs if self._metas[seq].head in heads}
        return deal(costs, ranks=layout.data, home=home)

    def bring(self, shares: Shares, keys: Iterable[str], layout: Layout) -> Plan:
        """What has to be sent so that each worker has `keys` of its data-parallel rank's share; as good as done."""
        wanted: dict[tuple[int, str], list[int]] = {}
        wanted_keys = sorted(keys)
        for data, seqs in enumerate(shares):
            members = layout.members(data)
            for seq in seqs:
                for key in wanted_keys:
                    if not self._holders[seq].get(key, NOBODY).issuperset(members):
                        wanted[seq, key] = members
        if not wanted:
            return []
        holders = {(seq, key): self._holders[seq].get(key, NOBODY) for seq, key in wanted}
        plan = redistribute((self._piece(*name) for name in wanted), holders=holders, wanted=wanted)
        self._note(wanted)
        return plan

    def _note(self, wanted: Mapping[tuple[int, str], list[int]]) -> None:
        for (seq, key), members in wanted.items():
            self._holders[seq][key].update(members)

    def _piece(self, seq: int, key: str) -> Piece:
        meta = self._metas[seq]
        shape = (1,) if key == "prompt_length" else (meta.size,) if key in OF_TRAJECTORIES else (meta.tokens,)
        return Piece(seq, key, STREAM_DTYPES.get(key, "float32"), shape)


# --- batches ---


class BatchFormer:
    """Selects the batch of one policy version after another."""

    def __init__(self, config: Config) -> None:
        self._groups = config.trainer.batch_groups
        self._minibatches = config.algorithm.minibatches
        self.max_staleness = config.staleness.max_staleness
        self.over_age = config.staleness.over_age
        self._trained: set[int] = set()
        self._rejected: set[int] = set()
        self._first_open = 0

    def reject(self, seqs: Iterable[int]) -> None:
        """These will never come."""
        self._rejected.update(seqs)
        self._advance()

    def trained(self, seqs: Iterable[int]) -> None:
        """These have been trained on."""
        self._trained.update(seqs)
        self._advance()

    def select(self, held: HeldGroups, *, policy_version: int) -> Selection:
        """The next batch at `policy_version`."""
        order: list[int] = []
        if self.over_age == "wait":
            order = next_in_order(self._trained, self._rejected, start=self._first_open, count=self._groups)
        return select_batch(
            held,
            policy_version=policy_version,
            groups_per_batch=self._groups,
            max_staleness=self.max_staleness,
            over_age=self.over_age,
            next_in_order=order,
        )

    def describe(self, selection: Selection, *, policy_version: int) -> str:
        """What the selection waits for, in words."""
        waits = f"actor_train v{policy_version} waits for {selection.short} of {self._groups} groups"
        return f"{waits}, oldest seq {selection.missing[0]}" if selection.missing else waits

    def minibatches(self, batch: Sequence[SampleMeta]) -> list[Sequence[SampleMeta]]:
        """The batch cut into minibatches, in order."""
        cuts = [round(i * len(batch) / self._minibatches) for i in range(self._minibatches + 1)]
        return [batch[a:b] for a, b in pairwise(cuts)]

    def young_tokens(self, meta: SampleMeta, *, policy_version: int) -> int:
        """Tokens of a group that enter the loss at `policy_version`."""
        over_age = count_over_age(meta.version_counts, policy_version=policy_version, max_staleness=self.max_staleness)
        return meta.sampled_tokens - over_age

    def _advance(self) -> None:
        while self._first_open in self._trained or self._first_open in self._rejected:
            self._trained.discard(self._first_open)
            self._rejected.discard(self._first_open)
            self._first_open += 1
