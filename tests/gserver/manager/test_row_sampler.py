"""The controller and `data.sampler`: rows come with admissions, follow the results, and outlive a rewind."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from streamrl.gserver.manager import row_sampler
from streamrl.records import progress
from streamrl.records.progress import Progress
from streamrl.rows import RowResults
from streamrl.transport.control import Admit, DataFacts, GroupInHand, Keep, Reject
from tests.gserver.harness import Run, joined, managed
from tests.gserver.scripted import scripted

ROWS = 50


def by_results(results: RowResults, count: int, random: np.random.Generator) -> Sequence[int]:
    """The row after the last one with a result, or 10."""
    known = np.flatnonzero(results.groups)
    return [int(known[-1]) + 1 if len(known) else 10] * count


def unable(results: RowResults, count: int, random: np.random.Generator) -> Sequence[int]:
    raise RuntimeError("no rows today")


def hangs(results: RowResults, count: int, random: np.random.Generator) -> Sequence[int]:
    time.sleep(60)
    return []


def sampler(name: str) -> dict[str, str]:
    return {"sampler": f"{__name__}:{name}"}


async def admit(run: Run, count: int) -> dict[int, int | None]:
    message = Admit(worker=0, count=count, data=DataFacts(ROWS))
    return {admission.seq: admission.row for admission in (await run.client.admit(message)).admissions}


async def test_rows_follow_the_results_and_stay_with_their_groups(tmp_path: Path) -> None:
    async with joined(tmp_path, data=sampler("by_results")) as (run, _):
        config = run.config
        assert await admit(run, 2) == {0: 10, 1: 10}
        await run.client.reject(Reject(worker=0, seq=0, reason="left out", reward=1.0))
        run.take(1)
        ledger = run.manager.ledger
        ledger.trained_on(1)
        assert ledger.rows.results[""][10].groups == 2
        assert await admit(run, 1) == {2: 11}
        reached = Progress(0, ledger.trained_seqs.ranges(), [(0, 1)], progress.prompts_digest(config))
        saved = msgspec.structs.replace(reached, data_rows=ROWS, rows=ledger.rows.state())
        checkpoint = tmp_path / "step-000000" / progress.STATE
        checkpoint.mkdir(parents=True)
        (checkpoint / progress.FILE).write_bytes(msgspec.json.encode(saved))
    resumed = progress.resuming(config, checkpoint.parent)
    async with scripted() as [gserver], managed(resumed) as run:
        await run.join(gserver)
        kept = await run.client.keep(Keep(0, [GroupInHand(4, gserver.url, row=40), GroupInHand(2, row=12)]))
        assert kept.kept == [4], "group 2 was made of another row"
        assert await admit(run, 1) == {2: 11}
        assert run.manager.ledger.rows.chosen[4] == 40


@pytest.mark.parametrize(
    ("name", "reason"), [("unable", "no rows today"), ("hangs", "no rows within 0.5 s"), ("missing", "has no")]
)
async def test_a_sampler_that_fails_ends_the_run_with_its_name(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_sampler, "SAMPLER_SECONDS", 0.5 if name == "hangs" else 30.0)
    async with joined(tmp_path, data=sampler(name)) as (run, _):
        assert await admit(run, 1) == {}
        status = await run.until(lambda status: status.state == "failed")
        assert "data.sampler: " in status.message
        assert reason in status.message
