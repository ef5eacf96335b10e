"""Something goes wrong at every step of a weight update, with real gservers and weights that really move.

Two gservers with the embedded engine, which are killed and stopped for good, or two SGLang servers, which write weights
in place: they are cut off, stopped and joined again, and one that failed in the middle holds a mixture.

After each fault the update either stands or was made again by the publisher; what failed comes back, and then
both gservers serve exactly the weights of the version that they name, unpaused. Meanwhile requests never stop,
and every token that was answered is compared with the weights of its version. Generation that would hang, a
mixture, or a gserver that does not come back fails the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from streamrl.errors import DeadlineExceeded, PublicationError
from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.server.child import ChildServer
from streamrl.gserver.sglang.serving import load
from streamrl.gserver.updates.calls import WeightCalls
from streamrl.models import ensure_checkpoint
from streamrl.trainer.worker.weight_broadcast import Broadcaster
from streamrl.transport.control import PublishBegin, PublishBeginReply, PublishCommit
from streamrl.transport.credentials import read_key
from streamrl.transport.generation import INITIAL_WEIGHT_VERSION, GenerationClient, PauseGeneration
from tests.gserver.installed import sglang_python
from tests.gserver.running_sglang import RunningSglang
from tests.gserver.updates.faults.fleet import PATIENCE, FaultyFleet, faulty_fleet, fleet_config, request
from tests.gserver.updates.faults.places import sglang_places
from tests.gserver.updates.faults.proxy import Fault
from tests.weights import FixedWeights

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]
NO_SGLANG = pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed")

JOIN = "/init_weights_update_group"
BEGIN = "/begin_weight_update"
BUCKET = "/update_weights_from_distributed"
VERIFY = "/weights_checker"
PAUSE = "/pause_generation"
SWAP = "/end_weight_update"
NAME = "/update_weight_version"
RESUME = "/continue_generation"

STEPS = {
    "embedded": [(JOIN, 0), (BEGIN, 0), (BUCKET, 0), (BUCKET, 1), (VERIFY, 0), (PAUSE, 0), (SWAP, 0), (RESUME, 0)],
    "sglang": [
        *((JOIN, 0), (PAUSE, 0), (BEGIN, 0), (NAME, 0), (BUCKET, 0), (BUCKET, 1)),
        *((VERIFY, 0), (SWAP, 0), (NAME, 1), (RESUME, 0)),
    ],
}
"""Of an update by broadcast, for each engine: a call, and how many calls of its kind succeed before."""
ENGINES = pytest.mark.parametrize("engine", [pytest.param("embedded"), pytest.param("sglang", marks=NO_SGLANG)])
ANSWER_SECONDS = 60.0
GIVEN_UP_SECONDS = 6.0
"""SGLang looks every 4 seconds whether its callers are still there."""
FAULTS: list[Fault] = ["error", "stop", "lost", "nonsense", "late"]
"""What can happen to a call besides the death of its gserver."""


def cases(engine: str) -> list[tuple[str, int, Fault]]:
    """Return one fault for each step, in turn, and the death of a gserver at each step.

    Every kind of fault is in `test_publication.py`, with scripted gservers. Faults that take as long as a
    deadline does ("stop", "late") have no turn on real SGLang.
    """
    turns = FAULTS if engine == "embedded" else [fault for fault in FAULTS if fault not in ("stop", "late")]
    found: list[tuple[str, int, Fault]] = []
    for number, (path, skip) in enumerate(STEPS[engine]):
        found += [(path, skip, turns[number % len(turns)]), (path, skip, "kill")]
    return found


async def strike(fleet: FaultyFleet, path: str, skip: int, fault: Fault) -> None:
    """One fault in one update, and what comes after it."""
    if path == JOIN:
        await fleet.replace_publisher()  # the next update forms a new group
    armed = fleet.arm(path, fault, skip=skip)
    await fleet.publish()
    assert armed.struck
    await fleet.settle()


@ENGINES
async def test_a_gserver_fails_at_every_step(tmp_path: Path, running_sglang: RunningSglang, engine: str) -> None:
    async with faulty_fleet(tmp_path, "collective", engine=engine, running=running_sglang) as fleet:
        for path, skip, fault in cases(engine):
            try:
                await strike(fleet, path, skip, fault)
            except BaseException as error:
                error.add_note(f"at {fault} in {path} (call {skip + 1}) of v{fleet.version + 1}")
                await running_sglang.tell_stacks()
                raise
        assert fleet.checked > len(cases(engine))
        await publisher_faults(fleet)


async def publisher_faults(fleet: FaultyFleet) -> None:
    """The publisher dies or fails at every step of its own, and another one goes on."""
    for how in ("before it sends", "before it commits", "in the middle"):
        before = fleet.version
        if how == "in the middle":
            await fails_in_the_middle(fleet)
        else:
            await disappears(fleet, sends=how == "before it commits")
        status = await fleet.run.until(lambda s: s.publication["state"] == "rolled_back", timeout=60)
        assert status.ledger.policy_version == before
        await fleet.settle()
        await fleet.replace_publisher()
        await fleet.publish()
        await fleet.settle()


async def disappears(fleet: FaultyFleet, *, sends: bool) -> None:
    """It begins, maybe sends everything, and is never heard of again."""
    carrier = fleet.publisher._carriers.choose()
    version = fleet.version + 1
    await asyncio.to_thread(carrier.prepare, version, FixedWeights(fleet.weights(version)))
    begin = await fleet.control.publish_begin(
        PublishBegin(version=version, weights=carrier.announce()), timeout=ANSWER_SECONDS
    )
    if sends:
        await asyncio.to_thread(carrier.send, begin)


async def fails_in_the_middle(fleet: FaultyFleet) -> None:
    """It sends a part, says that it failed, and nobody has to wait for a deadline."""
    carrier = fleet.publisher._carriers.choose()
    version = fleet.version + 1
    await asyncio.to_thread(carrier.prepare, version, FixedWeights(fleet.weights(version)))
    begin = await fleet.control.publish_begin(
        PublishBegin(version=version, weights=carrier.announce()), timeout=ANSWER_SECONDS
    )
    if isinstance(carrier, Broadcaster):
        await asyncio.to_thread(send_a_part, carrier, begin)
    reply = await fleet.control.publish_commit(
        PublishCommit(version=version, group_name=begin.group_name, error="it broke"), timeout=ANSWER_SECONDS
    )
    assert not reply.done
    assert reply.error == "the publisher failed: it broke"


def send_a_part(carrier: Broadcaster, begin: PublishBeginReply) -> None:
    carrier._buckets = carrier._buckets[:1]
    carrier.send(begin)


@NO_SGLANG
@pytest.mark.parametrize("left", ["running", "abandoned", "paused"])
async def test_a_server_is_joined_whatever_the_run_before_left_it_doing(
    tmp_path: Path, running_sglang: RunningSglang, left: str
) -> None:
    config = fleet_config("sglang", tmp_path, "disk")
    model_dir = ensure_checkpoint(config, cache=tmp_path / "cache")
    async with sglang_places(config, running_sglang, model_dir) as places:
        before = await places.fresh(1)
        client = GenerationClient(timeout=PATIENCE, key=read_key(config.gserver.api_key_env, setting=""))
        async with asyncio.TaskGroup() as group:
            requests = [group.create_task(client.generate(before.url, request(200))) for _ in range(4)]
            await asyncio.sleep(0.5)  # they run
            if left == "paused":
                await client.update(before.url, "/pause_generation", PauseGeneration(mode="in_place"))
            if left == "abandoned":
                for task in requests:
                    task.cancel()
            joined = await places.fresh(1)
            assert len((await client.generate(joined.url, request(4))).output_ids) == 4
            assert (await client.model_info(joined.url)).weight_version == INITIAL_WEIGHT_VERSION
        await client.close()


def scheduler_of(server: ChildServer) -> psutil.Process:
    (scheduler,) = [p for p in psutil.Process(server.process.pid).children(recursive=True) if "scheduler" in p.name()]
    return scheduler


@NO_SGLANG
async def test_a_server_that_still_runs_requests_nobody_waits_for_takes_weights(
    tmp_path: Path, running_sglang: RunningSglang
) -> None:
    """Its front has noticed that they are given up; its scheduler hears of it together with the new weights."""
    config = fleet_config("sglang", tmp_path, "disk")
    model_dir = ensure_checkpoint(config, cache=tmp_path / "cache")
    server = (await running_sglang.servers(2))[1]
    scheduler = scheduler_of(server)
    client = GenerationClient(timeout=PATIENCE, key=read_key(config.gserver.api_key_env, setting=""))
    requests = [asyncio.create_task(client.generate(server.url, request(200))) for _ in range(4)]
    await asyncio.sleep(0.5)  # they run
    scheduler.suspend()
    try:
        for task in requests:
            task.cancel()
        await asyncio.sleep(GIVEN_UP_SECONDS)
        loading = asyncio.create_task(load(client, server.url, model_dir, "another"))
        await asyncio.sleep(0.5)
    finally:
        scheduler.resume()
    await loading
    assert (await client.model_info(server.url)).weight_version == "another"
    assert len((await client.generate(server.url, request(4))).output_ids) == 4
    await client.close()


@NO_SGLANG
async def test_a_server_that_still_loads_weights_nobody_waits_for_is_told_of_others(
    tmp_path: Path, running_sglang: RunningSglang
) -> None:
    """Its front breaks down when one load comes while another is under way."""
    config = fleet_config("sglang", tmp_path, "disk")
    model_dir = ensure_checkpoint(config, cache=tmp_path / "cache")
    server = (await running_sglang.servers(2))[1]
    gserver = Gserver(1, server.url)
    client = GenerationClient(timeout=PATIENCE, key=read_key(config.gserver.api_key_env, setting=""))
    calls = WeightCalls(client, timeout=PATIENCE)
    await calls.pause(gserver, "retract")
    scheduler = scheduler_of(server)
    scheduler.suspend()
    try:
        with pytest.raises(DeadlineExceeded):
            await WeightCalls(client, timeout=1.0).load(gserver, str(model_dir), label="1", flush_cache=True)
        idle = asyncio.create_task(calls.wait_until_idle(gserver))
        await asyncio.sleep(0.5)
        assert not idle.done()
    finally:
        scheduler.resume()
    await idle
    await calls.load(gserver, str(model_dir), label="2", flush_cache=True)
    await calls.resume(gserver, timeout=PATIENCE)
    assert await calls.label(gserver) == "2"
    assert len((await client.generate(server.url, request(4))).output_ids) == 4
    await client.close()


async def refused(fleet: FaultyFleet, *, then: Callable[[], None] = lambda: None) -> None:
    """The next version is not what was trained; `then` ends that, and all go on with the one before."""
    before = fleet.version
    with pytest.raises(PublicationError, match=r"gserver/\d received other weights than were trained: 1 of"):
        await fleet.publish()
    then()
    await fleet.settle()
    assert fleet.version == before


@ENGINES
async def test_files_that_differ_from_what_was_trained_are_never_served(
    tmp_path: Path, running_sglang: RunningSglang, engine: str
) -> None:
    """They are damaged after their checksums were taken."""
    async with faulty_fleet(tmp_path, "disk", engine=engine, running=running_sglang) as fleet:
        await fleet.publish()
        carrier = fleet.publisher._carriers.choose()
        prepare = carrier.prepare

        def damage(version: int, source: object) -> None:
            prepare(version, source)  # type: ignore[arg-type]
            file = Path(carrier.announce().folder) / "model.safetensors"  # type: ignore[union-attr]
            content = bytearray(file.read_bytes())
            content[-3] ^= 4
            file.write_bytes(content)

        carrier.prepare = damage  # type: ignore[method-assign]
        await refused(fleet)


async def test_a_broadcast_that_differs_from_what_was_trained_is_never_served(
    tmp_path: Path, running_sglang: RunningSglang
) -> None:
    async with faulty_fleet(tmp_path, "collective", running=running_sglang) as fleet:
        await fleet.publish()
        carrier = fleet.publisher._carriers.choose()
        send = carrier.send

        def pretend(begin: PublishBeginReply) -> dict[str, str]:
            """Tell the checksums of other weights than were sent."""
            sums = send(begin)
            return sums | dict(zip(list(sums)[:1], list(sums.values())[1:2], strict=True))

        carrier.send = pretend  # type: ignore[method-assign]
        await refused(fleet, then=lambda: setattr(carrier, "send", send))
