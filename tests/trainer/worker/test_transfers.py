"""Plans carried out by real processes over gloo."""

from __future__ import annotations

import time
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from streamrl.errors import TransferError
from streamrl.trainer.redistributor import ArrayFacts, Transfer, concerning, redistribute
from streamrl.trainer.worker.data import ArrayStore, DataManager, layout, pack
from streamrl.transport.collective import open_store
from tests.forked import Forked
from tests.trainer.transfers import make_array, random_needs

RANKS = 4
PLANS = 40
LARGE = ArrayFacts(1, "packed_input_ids", "int32", (3_000_000,))
ABSENT = ArrayFacts(2, "values", "float32", (4,))
GENEROUS = 60.0
SHORT = 3.0


@contextmanager
def world(target):
    """Processes that run `target(rank, port, answers)`."""
    store = open_store("127.0.0.1")
    with Forked(target, [(rank, store.port) for rank in range(RANKS)]) as ranks:
        yield ranks


def meet(rank, port, *, timeout, name="data"):
    torch.set_num_threads(1)
    return DataManager(rank, world_size=RANKS, host="127.0.0.1", port=port, timeout_seconds=timeout, name=name)


def failure(call):
    """Message of the `TransferError` that `call` raises, and seconds until then."""
    began = time.monotonic()
    try:
        call()
    except TransferError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def carry_out_random_plans(rank, port, answers):
    """Beside a default process group with other rank numbers, which transfers must not depend on."""
    manager = meet(rank, port, timeout=GENEROUS)
    default = dist.PrefixStore("default", dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    dist.init_process_group("gloo", store=default, rank=RANKS - 1 - rank, world_size=RANKS)
    wrong, sent = [], 0
    for seed in range(PLANS):
        found = random_needs(seed, ranks=RANKS, groups=seed % 8)
        store = ArrayStore()
        for piece in found.pieces:
            if rank in found.holders[piece.seq, piece.key]:
                store.put(piece.seq, piece.key, make_array(piece))
        plan = redistribute(found.pieces, holders=found.holders, wanted=found.wanted)
        sent += len(plan)
        manager.execute(concerning(plan, rank) if seed % 2 else plan, store)
        for piece in found.pieces:
            name = (piece.seq, piece.key)
            here = rank in found.holders[name] | found.wanted[name]
            if (store.find(*name) is not None) != here:
                wrong.append(f"plan {seed}: {name} held: {not here}")
            elif here:
                array, right = store.get(*name), make_array(piece)
                if array.dtype != right.dtype or array.shape != right.shape or not np.array_equal(array, right):
                    wrong.append(f"plan {seed}: {name} is {array!r}, not {right!r}")
                if array.flags.writeable and rank not in found.holders[name]:
                    wrong.append(f"plan {seed}: {name} can be written to")
    store = ArrayStore()
    if rank in (0, 2):
        store.put(LARGE.seq, LARGE.key, make_array(LARGE))
    manager.execute([Transfer(2, [1], [LARGE]), Transfer(0, [3], [LARGE])], store)
    if not np.array_equal(store.get(LARGE.seq, LARGE.key), make_array(LARGE)):
        wrong.append("the large array differs")
    manager.close()
    dist.destroy_process_group()
    answers.send((rank, wrong, sent))


def test_random_plans_reach_every_rank_bit_by_bit():
    with world(carry_out_random_plans) as ranks:
        found = ranks.take(RANKS)
    assert sorted(rank for rank, _, _ in found) == list(range(RANKS))
    assert [wrong for _, wrong, _ in found] == [[]] * RANKS
    assert {sent for _, _, sent in found} == {found[0][2]}
    assert found[0][2] > 3 * PLANS


def lose_peers(rank, port, answers):
    """Rank 2 never comes to the gather, rank 3 has ended before the broadcast."""
    manager = meet(rank, port, timeout=SHORT)
    other = meet(rank, port, timeout=SHORT, name="other")
    store = ArrayStore()
    for piece in (LARGE, ABSENT):
        if rank != 0:
            store.put(piece.seq, piece.key, make_array(piece))
    gather = [Transfer(1, [0], [LARGE]), Transfer(2, [0], [ABSENT])]
    if rank == 3:
        answers.send((rank, {}))
        return
    found = {}
    if rank == 0:
        found["late"] = failure(lambda: manager.execute(gather, store))
        found["held"] = (store.find(LARGE.seq, LARGE.key) is not None, 0.0)
        found["gone"] = failure(lambda: other.execute([Transfer(3, [0, 1], [ABSENT])], store))
    elif rank == 1:
        manager.execute(gather, store)
        found["gone"] = failure(lambda: other.execute([Transfer(3, [0, 1], [ABSENT])], store))
    else:
        found["missing"] = failure(lambda: other.execute([Transfer(2, [3], [ArrayFacts(9, "x", "bool", (1,))])], store))
        wrong = ArrayFacts(ABSENT.seq, ABSENT.key, "float32", (5,))
        found["differs"] = failure(lambda: other.execute([Transfer(2, [3], [wrong])], store))
        time.sleep(2 * SHORT)
    manager.close()
    other.close()
    answers.send((rank, found))


def test_a_peer_that_is_late_gone_or_without_the_array_is_named_in_time():
    began = time.monotonic()
    with world(lose_peers) as ranks:
        found = dict(ranks.take(RANKS))
        ranks.end()
    assert time.monotonic() - began < 100
    late, seconds = found[0]["late"]
    assert "rank 2 sends 1 arrays (16 bytes, from seq 2 values on) to rank 0" in late
    assert "failed or not through after 3 s" in late
    assert SHORT <= seconds < SHORT + 10
    assert found[0]["held"][0] is False
    for rank in (0, 1):
        gone, seconds = found[rank]["gone"]
        assert gone.startswith(f"rank {rank}: meeting of ranks 0, 1, 3")
        assert 0 < seconds < SHORT + 10
    assert "rank 2 sends 1 arrays" in found[2]["missing"][0]
    assert "seq 9 x is not held here; of this group are: nothing" in found[2]["missing"][0]
    assert "seq 2 values is float32[4] here, not float32[5]" in found[2]["differs"][0]


def test_arrays_are_packed_at_aligned_offsets():
    pieces = [
        ArrayFacts(0, "a", "bool", (3,)),
        ArrayFacts(0, "b", "float64", ()),
        ArrayFacts(0, "c", "int32", (0, 2)),
        ArrayFacts(0, "d", "int32", (2, 2)),
    ]
    offsets, size = layout(pieces)
    assert (offsets, size) == ([0, 8, 16, 16], 32)
    store = ArrayStore()
    arrays = [np.array([True, False, True]), np.array(2.5), np.zeros((0, 2), np.int32), np.arange(8, dtype=np.int32)]
    arrays[3] = arrays[3].reshape(2, 4)[:, ::2]  # not contiguous
    for piece, array in zip(pieces, arrays, strict=True):
        store.put(piece.seq, piece.key, array)
    flat = pack(pieces, offsets, size, store)
    assert flat[:3].view(np.bool_).tolist() == [True, False, True]
    assert flat[8:16].view(np.float64).tolist() == [2.5]
    assert flat[16:].view(np.int32).tolist() == [0, 2, 4, 6]
