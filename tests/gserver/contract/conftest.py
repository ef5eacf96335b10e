"""The gservers that all tests of the package share: one at a time, for each engine and pause mode."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gserver.contract.fixture import MODES, Contract, RunningSglang, contract
from tests.gserver.contract.installed import sglang_python

NO_SGLANG = pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed")
SERVED = [
    pytest.param((engine, mode), id=f"{engine}-{mode}", marks=[NO_SGLANG] if engine == "sglang" else [])
    for engine in ("embedded", "sglang")
    for mode in MODES
]
"""Engine, and what a weight update does to running requests."""


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def running_sglang(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningSglang]:
    server = RunningSglang(tmp_path_factory.mktemp("running"))
    yield server
    await server.close()


@pytest_asyncio.fixture(scope="package", loop_scope="package", params=SERVED)
async def gserver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, running_sglang: RunningSglang
) -> AsyncIterator[Contract]:
    """Under `in_place` it starts SGLang itself; under the other two modes it joins a server that runs already."""
    engine, mode = request.param
    joins = await running_sglang.url() if engine == "sglang" and mode != "in_place" else ""
    async with contract(engine, tmp_path_factory.mktemp(engine), pause_mode=mode, joins=joins) as found:
        yield found
