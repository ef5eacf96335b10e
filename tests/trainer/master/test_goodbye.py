"""A master that ends alone: everybody knows at once, and nobody waits for its silence."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from streamrl.errors import PeerError
from streamrl.records import progress
from streamrl.records.metrics import METRICS_FILE, StepReport
from streamrl.trainer.master.process import serve
from tests.gserver.harness import managed, small_config


async def test_a_master_that_is_stopped_says_goodbye(tmp_path: Path) -> None:
    """By Ctrl-C, that is: its process cancels `serve`."""
    async with managed(small_config(tmp_path)) as run:
        await run.register("rollout")  # who is not told yet keeps the manager there
        serving = asyncio.create_task(serve(run.config, manager_url=run.url, model_dir=tmp_path))
        await run.until(lambda status: any(p.role == "master" for p in status.processes))
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        status = await run.client.status()
        assert (status.state, status.message) == ("failed", "master/0: StreamRLError: it was stopped")


async def test_a_master_that_comes_after_one_that_has_ended_ends_the_run(tmp_path: Path) -> None:
    """It cannot know what the ledger and the model workers have come to; the cluster begins the whole run again."""
    async with managed(small_config(tmp_path)) as run, run.member() as client:
        await run.register("rollout")  # who is not told yet keeps the manager there
        await run.register("master", pid=1)  # no process has that number
        message = msgspec.structs.replace(run.registration("master"), pid=os.getpid())
        with pytest.raises(PeerError, match="the run ends, since its master has; start the manager again"):
            await client.register(message, patience=5.0)
        assert (await run.client.status()).state == "failed"


async def test_a_master_that_is_turned_away_leaves_the_records_of_the_run_alone(tmp_path: Path) -> None:
    """The run has come further than the checkpoint that it began from, and may go on from a later one."""
    config = small_config(tmp_path, metrics={"sinks": []})
    checkpoint = config.run_dir / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    progress.write(checkpoint, progress.Progress(1, [(0, 2)], [], progress.prompts_digest(config)))
    config = small_config(tmp_path, run={"resume_from": str(checkpoint)}, metrics={"sinks": []})
    metrics = config.run_dir / METRICS_FILE
    reports = [StepReport(step=step, time=0.0, metrics={}, token_ages={}, spans=[]) for step in (1, 2, 3)]
    metrics.write_bytes(b"".join(msgspec.json.encode(report) + b"\n" for report in reports))
    before = metrics.read_bytes()
    async with managed(config) as run, run.member() as client:
        await run.register("rollout")  # who is not told yet keeps the manager there
        identity = progress.identity(config)
        await client.register(msgspec.structs.replace(run.registration("master"), begins_from=identity), patience=5.0)
        with pytest.raises(PeerError, match="the run ends, since its master has"):
            await serve(config, manager_url=run.url, model_dir=tmp_path)
    assert metrics.read_bytes() == before
