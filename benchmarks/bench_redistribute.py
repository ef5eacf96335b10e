"""What it costs to plan transfers between model workers, and to carry them out.

    python benchmarks/bench_redistribute.py [--quick]

Planning is pure: microseconds of processor time per group, by the number of groups and by what is asked.

| case | who holds, who wants |
|---|---|
| `members` | the DP head holds all, the other three ranks of its data-parallel rank want all |
| `redeal` | two data-parallel ranks of two members each; every group goes to the other one |
| `scattered` | random holders and wants among 8 ranks |

Carrying out is measured on one batch among 2 and 4 processes over gloo, against a plain broadcast of
as many bytes, from a buffer that is ready to go, among the same processes; repeats are interleaved.

| case | transfers |
|---|---|
| `members` | rank 0 holds the batch, everybody gets it |
| `redeal` | each rank holds its share and passes it on to the next one |
| `gather` | each rank holds its share, rank 0 gets all |
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from common import write_results
from rich.console import Console
from rich.table import Table

from streamrl.trainer.redistributor import ArrayFacts, Name, deal, redistribute
from streamrl.trainer.worker.data import ArrayStore, DataManager
from streamrl.transport.collective import destroy_group, form_group, open_store

SIBLINGS = 8
TOKENS = 512
PACKED = {
    "packed_input_ids": "int32",
    "packed_loss_mask": "bool",
    "packed_behavior_logprobs": "float32",
    "packed_policy_versions": "int32",
    "ref_logprobs": "float32",
    "values": "float32",
}
PER_SIBLING = {"seqlens": "int32", "rewards": "float32"}
TIMEOUT_SECONDS = 120.0
Needs = tuple[list[ArrayFacts], dict[Name, set[int]], dict[Name, set[int]]]


def describe_groups(count: int) -> list[ArrayFacts]:
    """The arrays of `count` groups, eight for each."""
    packed = [(key, dtype, (SIBLINGS * TOKENS,)) for key, dtype in PACKED.items()]
    short = [(key, dtype, (SIBLINGS,)) for key, dtype in PER_SIBLING.items()]
    return [ArrayFacts(seq, key, dtype, shape) for seq in range(count) for key, dtype, shape in packed + short]


def to_plan(case: str, count: int) -> Needs:
    pieces = describe_groups(count)
    rng = np.random.default_rng(0)
    have: Callable[[int], set[int]]
    want: Callable[[int], set[int]]
    match case:
        case "members":
            have, want = (lambda seq: {0}), (lambda seq: {0, 1, 2, 3})
        case "redeal":
            pairs = [{0, 1}, {2, 3}]
            have, want = (lambda seq: pairs[seq % 2]), (lambda seq: pairs[1 - seq % 2])
        case _:
            holds = [set(rng.choice(8, rng.integers(1, 4), replace=False).tolist()) for _ in range(count)]
            wants = [set(rng.choice(8, rng.integers(0, 4), replace=False).tolist()) for _ in range(count)]
            have, want = holds.__getitem__, wants.__getitem__
    return (
        pieces,
        {(piece.seq, piece.key): have(piece.seq) for piece in pieces},
        {(piece.seq, piece.key): want(piece.seq) for piece in pieces},
    )


def measure_planning(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for count in sizes:
        for case in ("members", "redeal", "scattered"):
            pieces, holders, wanted = to_plan(case, count)
            seconds = []
            for _ in range(repeats):
                began = time.process_time()
                plan = redistribute(pieces, holders=holders, wanted=wanted)
                seconds.append(time.process_time() - began)
            began = time.process_time()
            encoded = msgspec.msgpack.encode(plan)
            encoding = time.process_time() - began
            rows.append(
                {
                    "measures": "planning",
                    "case": case,
                    "groups": count,
                    "microseconds_per_group": round(1e6 * statistics.median(seconds) / count, 2),
                    "encoding_microseconds_per_group": round(1e6 * encoding / count, 2),
                    "plan_bytes_per_group": round(len(encoded) / count),
                    "steps": len(plan),
                }
            )
        costs = dict(enumerate(np.random.default_rng(0).lognormal(8, 0.6, count).astype(int).tolist()))
        home = {seq: seq % 4 for seq in costs}
        began = time.process_time()
        dealt = deal(costs, ranks=4, home=home)
        seconds = [time.process_time() - began]
        largest = max(sum(costs[seq] for seq in seqs) for seqs in dealt)
        moved = sum(home[seq] != rank for rank, seqs in enumerate(dealt) for seq in seqs)
        rows.append(
            {
                "measures": "dealing",
                "case": "deal over 4",
                "groups": count,
                "microseconds_per_group": round(1e6 * seconds[0] / count, 2),
                "largest_over_mean_load": round(largest * 4 / sum(costs.values()), 5),
                "moved_share": round(moved / count, 3),
            }
        )
    return rows


# --- carrying out --------------------------------------------------------------------------------


def to_carry_out(case: str, pieces: list[ArrayFacts], ranks: int) -> tuple[dict[Name, set[int]], dict[Name, set[int]]]:
    names = [(piece.seq, piece.key) for piece in pieces]
    match case:
        case "members":
            return {name: {0} for name in names}, {name: set(range(ranks)) for name in names}
        case "redeal":
            return {name: {name[0] % ranks} for name in names}, {name: {(name[0] + 1) % ranks} for name in names}
        case _:
            return {name: {name[0] % ranks} for name in names}, {name: {0} for name in names}


def worker(rank: int, ranks: int, port: int, groups: int, repeats: int, barrier: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    meeting = {"host": "127.0.0.1", "port": port}
    manager = DataManager(rank, world_size=ranks, timeout_seconds=TIMEOUT_SECONDS, **meeting)  # type: ignore[arg-type]
    plain = form_group(
        address="127.0.0.1",
        port=port,
        rank=rank,
        world_size=ranks,
        name="plain",
        backend="gloo",
        timeout=TIMEOUT_SECONDS,
    )
    pieces = describe_groups(groups)
    plans = {}
    for case in ("members", "redeal", "gather"):
        holders, wanted = to_carry_out(case, pieces, ranks)
        plans[case] = (holders, redistribute(pieces, holders=holders, wanted=wanted))
    for repeat in range(repeats + 1):
        for case, (holders, plan) in plans.items():
            moved = sum(piece.nbytes for piece in pieces)
            if case == "gather":
                moved = sum(piece.nbytes for piece in pieces if 0 not in holders[piece.seq, piece.key])
            store = ArrayStore()
            for piece in pieces:
                if rank in holders[piece.seq, piece.key]:
                    store.put(piece.seq, piece.key, np.ones(piece.shape, piece.dtype))
            flat = torch.ones(moved, dtype=torch.uint8)
            barrier.wait(TIMEOUT_SECONDS)
            began = time.perf_counter()
            manager.execute(plan, store)
            barrier.wait(TIMEOUT_SECONDS)
            executed = time.perf_counter() - began
            barrier.wait(TIMEOUT_SECONDS)
            began = time.perf_counter()
            dist.broadcast(flat, group=plain, group_src=0)
            barrier.wait(TIMEOUT_SECONDS)
            broadcast = time.perf_counter() - began
            if rank == 0 and repeat:  # the first repeat warms up
                answers.send((case, moved, executed, broadcast))
    destroy_group(plain)
    manager.close()


def measure_execution(ranks: int, groups: int, repeats: int) -> list[dict[str, Any]]:
    store = open_store("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    (receiving, sending), barrier = context.Pipe(duplex=False), context.Barrier(ranks)
    processes = [
        context.Process(target=worker, args=(rank, ranks, store.port, groups, repeats, barrier, sending), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = []
    while len(found) < 3 * repeats:
        ready = wait([receiving, *(process.sentinel for process in processes)], TIMEOUT_SECONDS)
        if receiving not in ready:  # a rank has died, and the others would wait for it
            raise SystemExit(f"no answer from the ranks; their exit codes are {[p.exitcode for p in processes]}")
        found.append(receiving.recv())
    for process in processes:
        process.join(30)
    rows = []
    for case in ("members", "redeal", "gather"):
        measured = [(moved, executed, broadcast) for name, moved, executed, broadcast in found if name == case]
        executed = statistics.median(seconds for _, seconds, _ in measured)
        broadcast = statistics.median(seconds for _, _, seconds in measured)
        rows.append(
            {
                "measures": "execution",
                "case": case,
                "processes": ranks,
                "groups": groups,
                "megabytes": round(measured[0][0] / 1e6, 1),
                "milliseconds": round(1e3 * executed, 2),
                "broadcast_milliseconds": round(1e3 * broadcast, 2),
                "ratio_to_broadcast": round(executed / broadcast, 3),
                "repeats": [round(1e3 * seconds, 2) for _, seconds, _ in measured],
                "broadcast_repeats": [round(1e3 * seconds, 2) for _, _, seconds in measured],
            }
        )
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="Planning and dealing, for groups of 8 arrays")
    for column in ("case", "groups", "µs per group", "µs to encode", "bytes on the wire", "steps"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        if row["measures"] != "execution":
            table.add_row(
                row["case"],
                f"{row['groups']:,}",
                f"{row['microseconds_per_group']:.1f}",
                *(str(row.get(k, "")) for k in ("encoding_microseconds_per_group", "plan_bytes_per_group", "steps")),
            )
    console.print(table)
    table = Table(title=f"Carrying out, groups of {SIBLINGS} × {TOKENS} tokens, against a broadcast of as many bytes")
    for column in ("case", "processes", "MB", "ms", "broadcast ms", "ratio"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        if row["measures"] == "execution":
            table.add_row(
                row["case"],
                str(row["processes"]),
                f"{row['megabytes']:.1f}",
                f"{row['milliseconds']:.1f}",
                f"{row['broadcast_milliseconds']:.1f}",
                f"{row['ratio_to_broadcast']:.2f}",
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Planning and carrying out of transfers between model workers.")
    parser.add_argument("--quick", action="store_true", help="under half a minute")
    quick = parser.parse_args().quick
    console = Console()
    groups, repeats = (128, 5) if quick else (512, 15)
    rows = measure_planning([1000, 10_000] if quick else [1000, 10_000, 100_000], repeats=3)
    for ranks in (2, 4):
        rows += measure_execution(ranks, groups, repeats)
        console.print(f"{ranks} processes: done", style="dim")
    show(rows, console)
    settings = {"siblings": SIBLINGS, "tokens": TOKENS, "groups": groups, "repeats": repeats, "quick": quick}
    console.print(f"written to {write_results('bench_redistribute', settings, rows)}")


if __name__ == "__main__":
    main()
