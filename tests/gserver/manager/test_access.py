"""Who may call the manager: tokens and roles, names that are not one's own, places that are taken, web pages."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest

from streamrl.errors import PeerError
from streamrl.gserver.manager.http import CALLS, HEALTH, LOOKS
from streamrl.machine import machine_identity, process_space
from streamrl.transport.control import Admit, FailRun, FinishRun, Heartbeat, Register
from streamrl.transport.credentials import MAY_SEND_TO, Verifier, bearer
from streamrl.transport.manager_client import PLACE_TAKEN, ControlClient
from tests.gserver.harness import HERE, Run, managed, small_config

LOGGER = "streamrl.gserver.manager.http"


async def status_of(run: Run, key: str, headers: dict[str, str]) -> int:
    method, path = key.split(" ")
    async with aiohttp.ClientSession(headers=headers) as session:
        data = b"{}" if method == "POST" else None
        async with session.request(method, run.url + path, data=data) as response:
            await response.read()
            return response.status


def test_every_call_names_the_rollout_worker_that_makes_it() -> None:
    for key, call in CALLS.items():
        if call.roles == {"rollout"}:
            assert call.message is not None
            assert "worker" in call.message.__struct_fields__, key


async def test_every_call_is_refused_to_those_whose_it_is_not(tmp_path: Path) -> None:
    """No call but those that look is open to a stranger; a member's token is good for the calls of its role alone."""
    async with managed(small_config(tmp_path)) as run:
        tokens = {}
        for role in ("gserver", "rollout", "model_worker"):
            reply = await run.register(role, address="http://127.0.0.1:1" if role == "gserver" else "")
            tokens[role] = bearer(reply.token)
        assert run.manager.access.caller("Bearer rollout/0.\udcba") is None, "bytes that are no UTF-8"
        strangers = ({}, bearer("0" * 64), bearer(""), {"Authorization": "Basic eDp5"}, bearer("rollout/0." + "0" * 64))
        for key, call in CALLS.items():
            if key == f"GET {HEALTH}":
                continue
            for stranger in strangers:
                assert await status_of(run, key, stranger) == (200 if key in LOOKS else 401), (key, stranger)
            for role, token in tokens.items():
                if role not in call.roles:
                    assert await status_of(run, key, token) == 403, (key, role)
        status = await run.client.status()
        assert (status.state, status.ledger.next_seq) == ("running", 0)


async def test_a_member_speaks_in_its_own_name_alone(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path, rollout={"workers": 2})) as run:
        first, second = [(await run.register("rollout", index, pid=index)).token for index in (0, 1)]
        assert first != second
        async with run.member(first) as client:
            for call in (
                client.admit(Admit(worker=1, count=1)),
                client.fail_run(FailRun(worker=1, error="so there")),
                client.heartbeat(Heartbeat(role="rollout", index=1, stats={}, error="so there")),
                client.heartbeat(Heartbeat(role="model_worker", index=0, stats={}, error="so there")),
                client.finish_run(FinishRun(error="so there")),
            ):
                with pytest.raises(PeerError) as refusal:
                    await call
                assert refusal.value.status == 403
            assert (await client.heartbeat(Heartbeat(role="rollout", index=0, stats={}))).known
        assert (await run.client.status()).state == "joining"


async def test_a_second_claimant_of_a_place_is_refused_and_named_unless_the_first_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with managed(small_config(tmp_path, limits={"silence_seconds": 1.0})) as run:
        me = Register("rollout", 0, "tcp://a", run.config.digest(), os.getpid(), HERE, machine=machine_identity())
        async with run.member() as first, run.member() as second:
            token = (await first.register(me, patience=5.0)).token
            claim = msgspec.structs.replace(me, address="tcp://b", pid=os.getppid())
            beating = asyncio.create_task(keep_beating(first))
            with pytest.raises(PeerError, match=f"rollout/0 is process {os.getpid()} on {HERE}") as refusal:
                await second.register(claim, patience=5.0)
            assert refusal.value.status == PLACE_TAKEN
            assert f"process {os.getppid()} on {HERE} claims to be rollout/0" in caplog.text
            assert (await run.process("rollout")).address == "tcp://a"
            assert (await first.register(me, patience=5.0)).token == token, "the same process may say it again"
            beating.cancel()  # now its lease runs out, and the one who waits for that gets the place
            new = await second.register(claim, patience=5.0)
            assert (await run.process("rollout")).address == "tcp://b"
            with pytest.raises(PeerError) as unknown:
                await first.heartbeat(Heartbeat(role="rollout", index=0, stats={}))
            assert unknown.value.status == 401, "it is nobody any more"
            assert new.token != token


async def test_the_place_of_a_process_that_has_ended_is_free_at_once(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path, limits={"silence_seconds": 600.0})) as run:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
        place = {"machine": machine_identity(), "process_space": process_space()}
        message = Register("rollout", 0, "", run.config.digest(), process.pid, HERE, **place)
        async with run.member() as first, run.member() as second:
            await first.register(message, patience=5.0)
            process.kill()
            await process.wait()
            await second.register(msgspec.structs.replace(message, pid=os.getpid()), patience=5.0)
            assert (await run.process("rollout")).pid == os.getpid()


async def keep_beating(client: ControlClient) -> None:
    while True:
        await client.heartbeat(Heartbeat(role="rollout", index=0, stats={}))
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:1"}, 200),
        ({"Host": "10.1.2.3:8000"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "["}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:7", "Origin": "http://localhost:7"}, 200),
        ({"Host": "localhost:7", "Origin": "http://localhost:8"}, 403),
    ],
)
async def test_a_web_page_can_forge_no_request(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    """Not even one that only looks, nor with a key that it might have come by."""
    async with managed(small_config(tmp_path)) as run:
        for key in ("GET /status", "GET /health", "GET /silent?after=5"):
            assert await status_of(run, key, bearer(run.secret.shown) | headers) == status


async def test_refusals_fill_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger=LOGGER)
    async with managed(small_config(tmp_path)) as run, aiohttp.ClientSession() as session:
        for _ in range(200):
            async with session.post(f"{run.url}/admit", data=b"x") as response:
                assert response.status == 401
    lines = [record for record in caplog.records if record.name == LOGGER]
    assert 1 <= len(lines) < 20


async def test_members_reach_exactly_the_receivers_of_their_role_with_their_credentials(tmp_path: Path) -> None:
    async with managed(small_config(tmp_path)) as run:
        receivers = {role: run.client.receiver_keys(role) for role in MAY_SEND_TO}
        assert receivers == run.manager.access.receivers
        for role in ("gserver", "rollout", "model_worker"):
            granted = await run.register(role, address="http://127.0.0.1:1" if role == "gserver" else "")
            assert granted.credentials.keys() == {to for to, senders in MAY_SEND_TO.items() if role in senders}
            for to, credential in granted.credentials.items():
                sender = Verifier(receivers[to]).sender(f"{credential.text} link".encode())
                assert (sender.role, sender.index) == (role, 0)
                assert credential.sender_key == receivers[to].senders.secret.decode()
                assert credential.receiver_key == receivers[to].own.public.decode()
