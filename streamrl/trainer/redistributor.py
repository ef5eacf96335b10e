"""Plans of array transfers between model workers, and the division of groups among data-parallel ranks. Pure.

An array is named by (sequence number, key). The master knows the arrays that each rank holds and will need; a plan
sends every rank its missing arrays. The plan travels inside requests, and the `DataManager` of each rank carries it
out.

Invariants (held by property tests): every wanted array reaches every rank that lacks it exactly once, no array is sent
to a rank that has it, and equal input gives an equal plan. The transfers of a plan are independent: a source holds its
arrays before the plan begins.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from streamrl.errors import TransferError

Name = tuple[int, str]
"""Sequence number and key of an array."""

SENDABLE_KINDS = "biuf"
"""Kinds of numpy dtypes that can be sent: bool, integers, floats."""
HOME_TOLERANCE = 1 / 100
"""Groups stay on their ranks if the largest load is then within this share of the smallest possible one."""


class ArrayFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Description of an array."""

    seq: int
    """Sequence number of its group."""
    key: str
    dtype: str
    """numpy's name, for example `int32`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes; raises `TransferError` for a dtype that cannot be sent."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


class Transfer(NamedTuple):
    """Arrays that one rank sends to one or several other ranks."""

    source: int
    destinations: list[int]
    """Receiving ranks, ascending."""
    pieces: list[ArrayFacts]

    def __str__(self) -> str:
        size = sum(piece.nbytes for piece in self.pieces)
        destinations = ", ".join(map(str, self.destinations))
        first = self.pieces[0]
        return (
            f"rank {self.source} sends {len(self.pieces)} arrays ({size} bytes, from seq {first.seq} {first.key} on) "
            f"to rank {destinations}"
        )


@lru_cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of that name; raises `TransferError` for one that cannot be sent."""
    try:
        found = np.dtype(name)
    except TypeError:
        found = None
    if found is None or found.kind not in SENDABLE_KINDS:
        raise TransferError(f"arrays of dtype {name!r} do not travel; bool, integers and floats do")
    return found


def concerning(plan: Iterable[Transfer], rank: int) -> list[Transfer]:
    """Return the transfers in which `rank` takes part, in order: the part of the plan that it needs."""
    return [transfer for transfer in plan if rank == transfer.source or rank in transfer.destinations]


def redistribute(
    pieces: Iterable[ArrayFacts],
    *,
    holders: Mapping[Name, Collection[int]],
    wanted: Mapping[Name, Collection[int]],
) -> list[Transfer]:
    """Return the transfers after which every rank in `wanted` has its arrays.

    An array that several ranks hold is sent by the rank with the fewest bytes to send so far (list scheduling, Graham
    1966: loads differ by at most one array if all ranks hold all arrays). Arrays with the same source and destinations
    form one transfer. Raises `TransferError` if a wanted array is missing or twice in `pieces`, or has no holder.
    """
    described: dict[Name, ArrayFacts] = {}
    for piece in pieces:
        if described.setdefault((piece.seq, piece.key), piece) is not piece:
            raise TransferError(f"seq {piece.seq} {piece.key} is described twice")
    for seq, key in wanted.keys() - described.keys():
        raise TransferError(f"seq {seq} {key} is wanted but its dtype and shape are not known")
    loads: dict[int, int] = defaultdict(int)
    routes: dict[tuple[int, tuple[int, ...]], list[ArrayFacts]] = defaultdict(list)
    # Arrays with a single holder first: there is no choice, and the other arrays can balance their cost.
    for name, piece in sorted(described.items(), key=lambda item: len(holders.get(item[0], ())) > 1):
        sources = holders.get(name, ())
        destinations = tuple(sorted({*wanted.get(name, ())} - {*sources}))
        if not destinations:
            continue
        if not sources:
            raise TransferError(
                f"seq {piece.seq} {piece.key} is wanted by rank {', '.join(map(str, destinations))} "
                "but no rank holds it; it was discarded, or never computed"
            )
        source = min(sources, key=lambda rank: (loads[rank], rank))
        loads[source] += piece.nbytes * len(destinations)
        routes[source, destinations].append(piece)
    return [Transfer(source, list(ranks), routes[source, ranks]) for source, ranks in _in_turns(routes)]


def _in_turns(routes: Iterable[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    """Return `routes` with all routes to a single destination first, which are sent at once; the others in turns by
    source, so that separate ranks may send at the same time."""
    turns: dict[int, int] = defaultdict(int)
    ordered = []
    for source, destinations in sorted(routes):
        turn = 0
        if len(destinations) > 1:
            turns[source] += 1
            turn = turns[source]
        ordered.append((turn, source, destinations))
    return [(source, destinations) for _, source, destinations in sorted(ordered)]


def deal(costs: Mapping[int, int], *, ranks: int, home: Mapping[int, int] | None = None) -> list[list[int]]:
    """Divide sequence numbers among data-parallel ranks 0 to `ranks - 1` by their cost, each list ascending.

    `costs`: sequence number → tokens, at least 0. `home`: sequence number → the rank that holds it now; a group without
    an entry can go to any rank.

    The least loaded rank gets the most expensive remaining group (longest processing time first: Graham, "Bounds on
    multiprocessing timing anomalies", 1969), so that the largest load is at most (4/3 - 1/(3 ranks)) times the best
    possible one, and loads differ by at most the largest cost. Another division starts at home and moves groups from
    the fullest to the emptiest rank while that helps (Finn and Horowitz, "A linear time approximation algorithm for
    multiprocessor scheduling", 1979), so it moves less. It is used if its largest load is at most that of the first
    division, or within `HOME_TOLERANCE` of the lower bound of the best possible.
    """
    afresh = _deal_afresh(costs, ranks)
    if not home:
        return [sorted(dealt) for dealt in afresh]
    settled = _deal_from_home(costs, ranks, home)
    least = max(sum(costs.values()) / ranks, max(costs.values(), default=0))
    largest = _largest_load(costs, settled)
    if largest <= max(_largest_load(costs, afresh), (1 + HOME_TOLERANCE) * least):
        return [sorted(dealt) for dealt in settled]
    return [sorted(dealt) for dealt in _relabel(costs, afresh, home)]


def _deal_afresh(costs: Mapping[int, int], ranks: int) -> list[list[int]]:
    loads = [(0, rank) for rank in range(ranks)]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for seq in sorted(costs, key=lambda seq: (-costs[seq], seq)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[seq], rank))
        dealt[rank].append(seq)
    return dealt


def _deal_from_home(costs: Mapping[int, int], ranks: int, home: Mapping[int, int]) -> list[list[int]]:
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]  # (cost, seq), ascending
    loads = [0] * ranks
    homeless = []
    for cost, seq in sorted((cost, seq) for seq, cost in costs.items()):
        rank = home.get(seq, -1)
        if not 0 <= rank < ranks:
            homeless.append((cost, seq))
            continue
        dealt[rank].append((cost, seq))
        loads[rank] += cost
    for cost, seq in reversed(homeless):
        rank = loads.index(min(loads))
        insort(dealt[rank], (cost, seq))
        loads[rank] += cost
    while True:
        fullest, emptiest = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[fullest] - loads[emptiest]
        entries = dealt[fullest]
        half = bisect_left(entries, (gap // 2, -1))  # moving half the gap's cost would close it
        near = [place for place in (half - 1, half) if 0 <= place < len(entries) and 0 < entries[place][0] < gap]
        if not near:
            return [[seq for _, seq in entries] for entries in dealt]
        moved = entries.pop(min(near, key=lambda place: abs(gap - 2 * entries[place][0])))
        insort(dealt[emptiest], moved)
        loads[fullest] -= moved[0]
        loads[emptiest] += moved[0]


def _relabel(costs: Mapping[int, int], dealt: list[list[int]], home: Mapping[int, int]) -> list[list[int]]:
    """Assign each rank the share with most of its own groups, the largest overlap first."""
    overlap: dict[tuple[int, int], int] = defaultdict(int)
    for share, seqs in enumerate(dealt):
        for seq in seqs:
            overlap[share, home.get(seq, -1)] += costs[seq]
    ranks = range(len(dealt))
    order = sorted(((share, rank) for share in ranks for rank in ranks), key=lambda pair: (-overlap[pair], pair))
    of_rank: dict[int, int] = {}
    for share, rank in order:
        if rank not in of_rank and share not in of_rank.values():
            of_rank[rank] = share
    return [dealt[of_rank[rank]] for rank in ranks]


def _largest_load(costs: Mapping[int, int], dealt: Iterable[Iterable[int]]) -> int:
    return max(sum(costs[seq] for seq in seqs) for seqs in dealt)
