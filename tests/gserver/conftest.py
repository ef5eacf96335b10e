"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.gserver.running_sglang import RunningSglang


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def running_sglang(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningSglang]:
    servers = RunningSglang(tmp_path_factory.mktemp("running"))
    yield servers
    await servers.close()
