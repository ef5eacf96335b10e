"""The gservers that all tests of the package share: one at a time, for each engine and pause mode.

What a gserver is asked for does not depend on what a weight update does to running requests, so most tests are about
one gserver of each engine (`ONE_OF_EACH`). A test that says more gets more: `@served(*WHATEVER_THE_PAUSE)`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gserver.contract.fixture import ONE_OF_EACH, Contract, contract
from tests.gserver.installed import sglang_python, vllm_python
from tests.gserver.running_sglang import RunningSglang
from tests.gserver.running_vllm import RunningVllm

SKIPPED = {
    "embedded": (),
    "sglang": pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed"),
    "vllm": pytest.mark.skipif(vllm_python() is None, reason="vLLM is not installed"),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "gserver" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("served")
    metafunc.parametrize(
        "gserver",
        [
            pytest.param(one, id="-".join(map(str, one)), marks=SKIPPED[one[0]])
            for one in (marker.args if marker is not None else ONE_OF_EACH)
        ],
        indirect=True,
        scope="package",
    )


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def running_vllm(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningVllm]:
    server = RunningVllm(tmp_path_factory.mktemp("vllm"))
    yield server
    await server.close()


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def gserver(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    running_sglang: RunningSglang,
    running_vllm: RunningVllm,
) -> AsyncIterator[Contract]:
    """SGLang and vLLM are started by their gserver under `in_place`, and with two ranks; else a server is joined that
    runs already."""
    engine, mode, ranks = request.param
    joins: list[str] = []
    if mode != "in_place" and ranks == 1:
        if engine == "sglang":
            joins = [server.url for server in await running_sglang.servers()]
        elif engine == "vllm":
            joins = [str(await running_vllm.socket())]
    async with contract(
        engine, tmp_path_factory.mktemp(engine), pause_mode=mode, joins=joins, tensor_parallel=ranks
    ) as found:
        yield found
