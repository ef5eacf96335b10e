"""The manager over real HTTP: membership, admission, routing, leases, the end of the run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.errors import PeerError
from tests.gserver.harness import Run, managed, small_config
from tests.gserver.scripted import ScriptedGserver, scripted


async def join(run: Run, *gservers: ScriptedGserver, workers: int = 1) -> None:
    """Register `gservers` and rollout workers, and wait until the gservers take groups."""
    for index, gserver in enumerate(gservers):
        await run.register("gserver", index, address=gserver.url, pid=100 + index)
    for index in range(workers):
        await run.register("rollout", index, pid=200 + index)
    await run.until_live(*range(len(gservers)))


async def test_a_process_with_another_configuration_is_refused(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path)) as run:
        with pytest.raises(PeerError, match=r"rollout/0 \(process 7 on here\) has another configuration") as refusal:
            await run.register("rollout", pid=7, digest="other")
        assert refusal.value.status == 409
        assert (await run.client.status()).processes == []


async def test_admission_stops_at_the_ledgers_bound(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path)) as run, scripted() as (gserver,):
        await join(run, gserver)
        assert await run.admit_seqs() == [0, 1, 2, 3]
        assert (await run.client.status()).ledger.room == 0
