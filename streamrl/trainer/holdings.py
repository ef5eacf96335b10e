"""Who holds which arrays: what the master knows of the data that its model workers have. Pure.

Groups arrive at DP heads; model function calls add arrays there; plans of the Redistributor bring
copies elsewhere. Everything about a group ends with `discard`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from streamrl.trainer.layout import Layout
from streamrl.trainer.redistributor import Piece, Plan, deal, redistribute
from streamrl.types import SampleMeta

STREAM_DTYPES = {
    "packed_input_ids": "int32",
    "packed_loss_mask": "bool",
    "packed_behavior_logprobs": "float32",
    "packed_policy_versions": "int32",
    "seqlens": "int32",
    "prompt_length": "int32",
    "rewards": "float32",
}
"""Of the arrays that a group brings. Those that model function calls give are float32."""
OF_SIBLINGS = frozenset({"seqlens", "rewards"})
"""Keys with one number for each sibling; `prompt_length` has one for the group, all others one for each token."""

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
        shape = (1,) if key == "prompt_length" else (meta.size,) if key in OF_SIBLINGS else (meta.tokens,)
        return Piece(seq, key, STREAM_DTYPES.get(key, "float32"), shape)
