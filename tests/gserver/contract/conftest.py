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
    *(pytest.param(("embedded", mode, 1), id=f"embedded-{mode}") for mode in MODES),
    *(pytest.param(("sglang", mode, 1), id=f"sglang-{mode}", marks=NO_SGLANG) for mode in MODES),
    pytest.param(("sglang", "retract", 2), id="sglang-two-ranks", marks=NO_SGLANG),
]
"""Engine, what a weight update does to running requests, and the ranks of a server."""


@pytest_asyncio.fixture(scope="package", loop_scope="session", params=SERVED)
async def gserver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, running_sglang: RunningSglang
) -> AsyncIterator[Contract]:
    """SGLang is started by its gserver under `in_place`, and with two ranks; else a server is joined that runs already
    and asks for a key."""
    engine, mode, ranks = request.param
    joins = engine == "sglang" and mode != "in_place" and ranks == 1
    urls = [server.url for server in await running_sglang.servers()] if joins else []
    async with contract(
        engine, tmp_path_factory.mktemp(engine), pause_mode=mode, joins=urls, tensor_parallel=ranks
    ) as found:
        yield found
