"""The simulated engine keeps the contract of an engine."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from streamrl.config import SimulationConfig
from streamrl.gserver.server.engine import Job, Output, QueueFull, Ticket
from streamrl.gserver.simulated import SimulatedEngine
from streamrl.transport.generation import SamplingParams


def make_engine(**settings: Any) -> SimulatedEngine:
    simulation = {name: settings.pop(name) for name in SimulationConfig.__struct_fields__ if name in settings}
    limits = {"max_running": 8, "max_queued": 1000, "max_context": 10_000, "seed": 0, **settings}
    return SimulatedEngine(
        SimulationConfig(**{"token_seconds": 0.0005, **simulation}), model_path="none", update_timeout=20.0, **limits
    )


@pytest.fixture
async def engine() -> AsyncIterator[SimulatedEngine]:
    engine = make_engine()
    await engine.start()
    yield engine
    await engine.close()


def job(rid: str, *, stream: bool = False, **params: Any) -> Job:
    sampling = SamplingParams(**{"max_new_tokens": 5000, **params})
    return Job(rid=rid, input_ids=[90_000, 1, 2], params=sampling, stream=stream)


async def first(ticket: Ticket) -> Output:
    async for output in ticket.updates():
        return output
    raise AssertionError


async def test_lengths_are_log_normal_and_paces_differ() -> None:
    engine = make_engine(token_seconds=1e-6, mean_length=40.0, sigma=0.8, max_running=2000, vocab_size=8)
    outputs = [await t.result() for t in [engine.submit(job(str(i))) for i in range(2000)]]
    lengths = [len(output.output_ids) for output in outputs]
    assert statistics.mean(lengths) == pytest.approx(40, rel=0.12)
    assert statistics.stdev(math.log(n) for n in lengths) == pytest.approx(0.8, rel=0.12)
    assert {token for output in outputs for token in output.output_ids} == set(range(8))
    assert outputs[0].logprobs[0] == pytest.approx(-math.log(8))
    assert all(output.finish_reason and output.finish_reason.type == "stop" for output in outputs)
    assert engine.stats()["tokens_generated_total"] == sum(lengths)


async def test_slots_bound_what_runs() -> None:
    engine = make_engine(max_running=2, max_queued=3, token_seconds=0.002)
    tickets = [engine.submit(job(str(i), max_new_tokens=10, ignore_eos=True)) for i in range(5)]
    stats = engine.stats()
    assert (stats["running"], stats["queued"]) == (2, 3)
    with pytest.raises(QueueFull):
        engine.submit(job("more"))
    began = time.monotonic()
    for ticket in tickets:
        await ticket.result()
    assert time.monotonic() - began > 0.02  # three rounds of about 20 ms, paces apart
    stats = engine.stats()
    assert (stats["running"], stats["queued"]) == (0, 0)
    assert stats["slot_seconds_total"] > stats["busy_seconds_total"] > 0
    assert stats["prompt_tokens_total"] == 15


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_pauses_and_versions(mode: Any, engine: SimulatedEngine) -> None:
    ticket = engine.submit(job("a", stream=True, max_new_tokens=200, ignore_eos=True))
    await first(ticket)
    await engine.pause(mode)
    before = engine.stats()["tokens_generated_total"]
    late = engine.submit(job("late", max_new_tokens=4, ignore_eos=True))
    await engine.set_version("5")
    await asyncio.sleep(0.05)
    assert engine.stats()["tokens_generated_total"] == before
    assert not late.done
    await engine.resume()
    output = await ticket.result()
    assert [(span.version, span.start) for span in output.spans] == [("default", 0), ("5", before)]
    assert output.spans[-1].end == len(output.output_ids) == 200
    assert output.num_retractions == (mode == "retract")
    assert [span.version for span in (await late.result()).spans] == ["5"]
    assert engine.stats()["pause_seconds_total"] > 0.04


async def test_aborts(engine: SimulatedEngine) -> None:
    tickets = [engine.submit(job(str(i), stream=i == 0, max_new_tokens=5000, ignore_eos=True)) for i in range(12)]
    await first(tickets[0])
    assert await engine.abort("0")
    assert await engine.abort("11")
    assert not await engine.abort("0")
    assert len((await tickets[0].result()).output_ids) >= 1
    assert (await tickets[11].result()).output_ids == []
    await engine.pause("abort")
    outputs = [await ticket.result() for ticket in tickets]
    assert {output.finish_reason and output.finish_reason.type for output in outputs} == {"abort"}
    assert engine.stats()["running"] == engine.stats()["queued"] == 0
