"""Cost of an entry in the master's buffer, by the number of groups that it holds.

    python benchmarks/bench_buffer.py [--quick]

Entries pass through the buffer as they do in a run with a reference model: they arrive, `ref_inf`
reads them and gives its key, batches are formed and trained on (`discard`). `late_put` is a single arrival until
its reader has it; it wakes one task that waits for a batch and one that waits for arrivals. Each
figure is microseconds of processor time per entry.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from common import write_results
from rich.console import Console
from rich.table import Table

from streamrl.config import from_dict
from streamrl.ledger import Ledger, OverAge, ReadyGroups, Selection, select_batch
from streamrl.trainer.graph import MFC, graph_of
from streamrl.trainer.layout import Layout
from streamrl.trainer.master.buffer import AsyncIOSequenceBuffer
from streamrl.types import SampleMeta

BATCH = 512
LATE = 2000
OVER_AGE: tuple[OverAge, ...] = ("mask", "drop", "wait")
OPERATIONS = ("put_batch", "late_put", "get_batch_for_rpc", "amend_batch", "take_batch", "discard")


def make_metas(count: int) -> list[SampleMeta]:
    rewards, lengths, versions = [0.0] * 8, [400] * 8, [{v: 1600, v + 1: 1600} for v in range(9)]
    return [
        SampleMeta(
            seq=seq,
            head=seq % 4,
            worker="rollout/0",
            size=8,
            tokens=4096,
            rewards=rewards,
            response_lengths=lengths,
            version_counts=versions[seq % len(versions)],
            generation_seconds=1.0,
        )
        for seq in range(count)
    ]


class Clock:
    """Adds up seconds for each operation."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(OPERATIONS, 0.0)

    @asynccontextmanager
    async def time(self, operation: str) -> AsyncIterator[None]:
        began = time.process_time()
        yield
        self.seconds[operation] += time.process_time() - began


def describe(selection: Selection) -> str:
    return f"waits for {selection.short} groups"


async def read_on(buffer: AsyncIOSequenceBuffer, ref_inf: MFC, arrived: asyncio.Queue[list[SampleMeta]]) -> None:
    while True:
        arrived.put_nowait(await buffer.get_batch_for_rpc(ref_inf))


async def pass_through(count: int, over_age: OverAge) -> dict[str, float]:
    """Microseconds per entry of each operation when `count` entries are held."""
    metas = make_metas(count + LATE)
    graph = graph_of(from_dict({"algorithm": {"kl_coef": 0.1}}))
    (ref_inf,) = graph.reading("arrivals")
    ledger = Ledger(groups_per_batch=BATCH, max_staleness=count, lease_seconds=1e9)
    ledger.admit("rollout/0", count + LATE, now=0.0)
    buffer, layout = AsyncIOSequenceBuffer(graph, ledger, wait_warning_seconds=600.0), Layout()
    taken = 0

    def select(ready: ReadyGroups) -> Selection:
        order = ledger.next_in_order(BATCH) if over_age == "wait" else ()
        return select_batch(
            ready,
            policy_version=9,
            groups_per_batch=BATCH,
            max_staleness=16,
            over_age=over_age,
            next_in_order=order,
        )

    clock = Clock()
    async with clock.time("put_batch"):
        for first in range(0, count, BATCH):
            buffer.put_batch(metas[first : min(first + BATCH, count)])
    read: list[list[int]] = []
    async with clock.time("get_batch_for_rpc"):
        while sum(map(len, read)) < count:
            read.append([meta.seq for meta in await buffer.get_batch_for_rpc(ref_inf)])
    waiting = asyncio.create_task(buffer.take_batch(select, describe))
    arrived: asyncio.Queue[list[SampleMeta]] = asyncio.Queue()
    reading = asyncio.create_task(read_on(buffer, ref_inf, arrived))
    async with clock.time("late_put"):
        for meta in metas[count:]:
            buffer.put_batch([meta])
            await arrived.get()
    reading.cancel()
    async with clock.time("amend_batch"):
        for seqs in read:
            buffer.amend_batch(["ref_logprobs"], [seqs], layout)
    await waiting
    while taken + BATCH <= count:
        async with clock.time("take_batch"):
            batch, _ = await buffer.take_batch(select, describe)
        seqs = [meta.seq for meta in batch]
        taken += len(seqs)
        async with clock.time("discard"):
            buffer.trained_on(seqs)
    entries = dict.fromkeys(OPERATIONS, count) | {"late_put": LATE, "take_batch": taken, "discard": taken}
    return {operation: 1e6 * clock.seconds[operation] / entries[operation] for operation in OPERATIONS}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"Microseconds per entry (batches of {BATCH})")
    for column in ("entries", "over_age", *OPERATIONS):
        table.add_column(column.replace("_", " "), justify="left" if column == "over_age" else "right")
    for row in rows:
        table.add_row(f"{row['entries']:,}", row["over_age"], *(f"{row[name]:.2f}" for name in OPERATIONS))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of an entry in the master's buffer.")
    parser.add_argument("--quick", action="store_true", help="up to 100,000 entries")
    quick = parser.parse_args().quick
    console = Console()
    sizes = [1024, 10 * 1024, 100 * 1024] + ([] if quick else [1000 * 1024])
    rows = []
    for count in sizes:
        for over_age in OVER_AGE:
            costs = asyncio.run(pass_through(count, over_age))
            rows.append({"entries": count, "over_age": over_age} | {name: round(c, 3) for name, c in costs.items()})
            console.print(f"{count:,} entries, {over_age}: done", style="dim")
    show(rows, console)
    settings = {"batch": BATCH, "late": LATE, "quick": quick, "unit": "microseconds of processor time per entry"}
    console.print(f"written to {write_results('bench_buffer', settings, rows)}")


if __name__ == "__main__":
    main()
