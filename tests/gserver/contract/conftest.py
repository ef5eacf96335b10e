"""The gservers that all tests of the package share: one at a time, for each engine and pause mode."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gserver.contract.fixture import MODES, Contract, contract
from tests.gserver.installed import sglang_python
from tests.gserver.running_sglang import RunningSglang

NO_SGLANG = pytest.mark.skipif(sglang_python() is None, reason="SGLang is not installed")
SERVED = [
    pytest.param((engine, mode), id=f"{engine}-{mode}", marks=[NO_SGLANG] if engine == "sglang" else [])
    for engine in ("embedded", "sglang")
    for mode in MODES
]
"""Engine, and what a weight update does to running requests."""


@pytest_asyncio.fixture(scope="package", loop_scope="session", params=SERVED)
async def gserver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, running_sglang: RunningSglang
) -> AsyncIterator[Contract]:
    """Under `in_place` it starts SGLang itself; under the other two modes it joins a server that runs already, and asks
    for a key."""
    engine, mode = request.param
    joins = (await running_sglang.servers())[0].url if engine == "sglang" and mode != "in_place" else ""
    async with contract(engine, tmp_path_factory.mktemp(engine), pause_mode=mode, joins=joins) as found:
        yield found
