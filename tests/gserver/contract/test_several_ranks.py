"""One weight group of two SGLang servers: one has two ranks on this machine's CPU, the other has one."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import psutil
import pytest

from streamrl.gserver.manager.gserver import Gserver
from streamrl.gserver.updates.calls import WeightCalls
from tests.gserver.contract.fixture import MARKS, TOLERANCE, Contract, contract, output_logprobs
from tests.gserver.harness import live_gservers
from tests.gserver.installed import sglang_python
from tests.gserver.running_sglang import KEY, RunningSglang

pytestmark = [
    *MARKS,
    pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed"),
]

REMOVED = (
    *("/update_weights_from_ipc", "/update_weights_from_tensor", "/load_lora_adapter_from_tensors"),
    *("/start_profile", "/v1/chat/completions", "/health_generate"),
)
PROMPT = [3, 1, 4, 1, 5]


async def served_alike(run: Contract) -> None:
    """Both give the log-probabilities of the weights that were published last."""
    for url in run.urls:
        assert (await run.client.model_info(url)).weight_version == str(run.version)
        run.url = url
        reply = await run.generate(PROMPT, 20)
        assert output_logprobs(reply) == pytest.approx(run.logprobs(PROMPT, reply.output_ids), abs=TOLERANCE)


async def test_servers_listen_at_the_loopback_address_alone(running_sglang: RunningSglang) -> None:
    """Also where the ranks of one meet."""
    (server,) = await running_sglang.servers()
    root = psutil.Process(server.process.pid)
    listened = {
        connection.laddr.ip
        for process in [root, *root.children(recursive=True)]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listened == {"127.0.0.1"}


async def test_a_server_does_what_a_run_needs_and_nothing_else(running_sglang: RunningSglang) -> None:
    (server,) = await running_sglang.servers()
    key = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(server.url) as session:
        for path in REMOVED:
            async with session.post(path, json={}, headers=key) as response:
                assert response.status == 404, path
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await session.ws_connect("/v1/realtime")
        for path in ("/health", "/metrics"):
            async with session.get(path) as response:
                assert response.status == 200, path


async def test_servers_of_one_and_of_two_ranks_are_in_one_weight_group(
    tmp_path: Path, running_sglang: RunningSglang
) -> None:
    """A rank of the first dies in the middle of a transfer: its server goes, and the other goes on."""
    (single,) = await running_sglang.servers()
    async with (
        running_sglang.server(0, tensor_parallel=2) as spread,
        contract("sglang", tmp_path, pause_mode="retract", joins=[spread.url, single.url], count=2) as run,
    ):
        assert [(await run.client.server_info(url)).tp_size for url in run.urls] == [2, 1]
        await run.publish(1.7)
        await served_alike(run)
        await run.publish(0.6)  # in the same group
        await served_alike(run)
        told = await WeightCalls(run.client, timeout=30).received(Gserver(0, spread.url))
        assert told is not None
        assert len(told) == 2
        assert told[0] == told[1], "each rank took the whole weights"
        assert told[0].checksums

        last_rank = [p for p in psutil.Process(spread.process.pid).children() if "TP1" in p.name()]
        await run.publish(1.3, halfway=lambda: last_rank.pop().kill())
        assert live_gservers(await run.run.client.status()) == {1}
        run.urls.remove(spread.url)
        await served_alike(run)
