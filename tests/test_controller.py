"""The controller as a process would run it: manager and master together, and how they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from streamrl.config import Config
from streamrl.controller import serve
from streamrl.errors import PeerLost, RunStopped, StreamRLError
from streamrl.gserver.manager import core
from streamrl.records import lineage as lineages
from streamrl.records import progress
from streamrl.records.metrics import FINAL_FILE, METRICS_FILE, StepReport
from streamrl.trainer.master.process import Master
from streamrl.transport.control import Drain, FinishRun
from tests.gserver.harness import Run, cancelled_at_the_end, first_result, small_config


@pytest.fixture(autouse=True)
def _short_goodbye(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "LINGER_SECONDS", 0.2)


@asynccontextmanager
async def controlled(config: Config) -> AsyncIterator[Run]:
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(config, host="127.0.0.1", port=0, on_ready=ready.set_result))
    async with cancelled_at_the_end(Run(config, await first_result(serving, ready), serving)) as run:
        yield run


def quiet(folder: Path, **sections: object) -> Config:
    return small_config(folder, **({"metrics": {"sinks": []}} | sections))  # type: ignore[arg-type]


async def test_it_beats_and_tells_what_it_waits_for(tmp_path: Path) -> None:
    config = quiet(tmp_path)
    async with controlled(config) as run:
        status = await run.until(lambda s: any(p.waiting_for == "model workers to connect" for p in s.processes))
        (controller,) = status.processes
        assert controller.role == "controller"
        assert controller.address.startswith("tcp://127.0.0.1:")
        (peer,) = await run.client.topology("controller", 1, patience=1.0)
        assert peer.address == controller.address
    lines = [json.loads(line) for line in (config.run_dir / "timeline.jsonl").read_text().splitlines()]
    stats = next(line["stats"] for line in lines if line["kind"] == "heartbeat" and "groups_held" in line["stats"])
    # what may start (all of it: nothing was admitted), and who waits for it
    assert stats["ledger_room"] == (config.staleness.max_staleness + 1) * config.trainer.batch_groups
    assert stats["groups_running"] == stats["admissions_waiting"] == stats["groups_held"] == 0
    assert stats["processor_seconds_total"] > 0
    assert stats["machine_processor_seconds_total"] > 0


async def test_a_fault_of_the_master_ends_the_run_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(self: Master) -> str:
        raise KeyError("a bug")

    monkeypatch.setattr(Master, "run", fail)
    async with controlled(quiet(tmp_path)) as run:
        await run.register("rollout")
        status = await run.until(lambda s: s.state == "failed")
        assert status.message == "controller/0: KeyError: 'a bug'"
        assert (await run.beat("rollout")).stop
        with pytest.raises(StreamRLError, match="the run has failed: controller/0: KeyError: 'a bug'"):
            await asyncio.wait_for(asyncio.shield(run.serving), 10)
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(("deaths", "rewinds"), [(1, 1), (3, 2)], ids=["within the budget", "beyond it"])
async def test_the_death_of_a_model_worker_begins_another_lineage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, rewinds: int
) -> None:
    died = iter([PeerLost("model_worker/0 has died")] * deaths)

    async def train(self: Master) -> str:
        if (death := next(died, None)) is not None:
            raise death
        return "all steps are made"

    async def finish(self: Master) -> str:
        return ""

    monkeypatch.setattr(Master, "run", train)
    monkeypatch.setattr(Master, "finish", finish)
    config = quiet(tmp_path, restarts={"number": 2})
    async with controlled(config) as run:
        ending = asyncio.wait_for(asyncio.shield(run.serving), 30)
        if deaths == rewinds:
            await ending
        else:
            with pytest.raises(StreamRLError, match=r"restarts\.number"):
                await ending
    causes = [lineage.cause for lineage in lineages.read(config.run_dir) if lineage.cause]
    assert causes == ["model_worker/0 has died"] * rewinds


async def test_a_fault_beside_a_death_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = iter([ExceptionGroup("two tasks", [PeerLost("model_worker/0 has died"), KeyError("a bug")])])

    async def train(self: Master) -> str:
        if (both := next(found, None)) is not None:
            raise both
        raise ExceptionGroup("two tasks", [StreamRLError("a bad step"), KeyError("another bug")])

    monkeypatch.setattr(Master, "run", train)
    async with controlled(quiet(tmp_path)) as run:
        with pytest.raises(StreamRLError, match="the run has failed: controller/0: StreamRLError: a bad step"):
            await asyncio.wait_for(asyncio.shield(run.serving), 30)
    assert "KeyError: 'a bug'" in caplog.text
    assert "KeyError: 'another bug'" in caplog.text


async def test_a_process_that_a_launcher_saw_die_ends_training(tmp_path: Path) -> None:
    async with controlled(quiet(tmp_path)) as run:
        await run.register("rollout")
        await run.client.finish_run(FinishRun(error="gserver/0 died"))
        assert (await run.beat("rollout")).stop
        with pytest.raises(StreamRLError, match="gserver/0 died"):
            await asyncio.wait_for(asyncio.shield(run.serving), 10)


async def test_one_that_is_drained_before_its_first_step_stops_the_run(tmp_path: Path) -> None:
    config = quiet(tmp_path)
    async with controlled(config) as run:
        await run.client.drain(Drain(role="controller", index=0))
        with pytest.raises(RunStopped, match="stopped on request after step 0"):
            await asyncio.wait_for(asyncio.shield(run.serving), 10)
    assert json.loads((config.run_dir / FINAL_FILE).read_text())["status"]["state"] == "stopped"


async def test_one_that_cannot_listen_leaves_the_records_of_the_run_alone(tmp_path: Path) -> None:
    """The run has come further than the checkpoint that it began from, and another controller runs it."""
    config = quiet(tmp_path)
    checkpoint = config.run_dir / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    progress.write(checkpoint, progress.Progress(1, [(0, 2)], [], progress.prompts_digest(config)))
    config = quiet(tmp_path, run={"resume_from": str(checkpoint)})
    async with controlled(config) as run:
        await run.until(lambda s: any(p.waiting_for for p in s.processes))  # it has taken its records up
        metrics = config.run_dir / METRICS_FILE
        reports = [StepReport(step=step, time=0.0, metrics={}, token_ages={}, spans=[]) for step in (1, 2, 3)]
        metrics.write_bytes(b"".join(msgspec.json.encode(report) + b"\n" for report in reports))
        before = metrics.read_bytes()
        port = int(run.url.rpartition(":")[2])
        with pytest.raises(StreamRLError, match=f"cannot listen at 127.0.0.1:{port}"):
            await serve(config, host="127.0.0.1", port=port)
        assert metrics.read_bytes() == before
