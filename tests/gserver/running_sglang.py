"""Real SGLang servers that the runs of tests join one after another, since each takes long to start.

They ask for a key, and keep prompts. All have a model of the shape of `SCRATCH`; a run that joins brings its own
weights.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

from streamrl import config as configuration
from streamrl.gserver.server.child import ChildServer
from streamrl.gserver.sglang.serving import sglang_server
from streamrl.models import ensure_checkpoint
from streamrl.transport.credentials import GserverKeys
from tests.gserver.installed import sglang_python

START_SECONDS = 400.0
MAX_CONTEXT = 8192
MAX_RUNNING = 8
GROUP_SECONDS = 5.0
"""The longest that they wait in a weight group."""
KEY_VARIABLE = "STREAMRL_TEST_GSERVER_KEY"
"""What `gserver.api_key_env` has to name in a run that joins; set from the first server on."""
KEY = "what the callers of these show".replace(" ", "-")
SCRATCH: dict[str, Any] = {
    "path": "scratch",
    "scratch": {
        "alphabet": "0123456789+=> x",
        "hidden_size": 64,
        "layers": 2,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 32,
    }
    | {"max_position_embeddings": MAX_CONTEXT},
}
"""`model` of a configuration; its vocabulary is of 16 tokens, the last of which ends a response."""


class RunningSglang:
    """As many as were asked for; `close` ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = AsyncExitStack()
        self._servers: list[ChildServer] = []
        os.environ[KEY_VARIABLE] = KEY

    async def servers(self, count: int = 1) -> list[ChildServer]:
        """Those that answer; starts what is missing."""
        missing = range(len(self._servers), count)
        new = [self.server(index) for index in missing]
        self._servers += await asyncio.gather(*(self._stack.enter_async_context(server) for server in new))
        return self._servers[:count]

    async def tell_stacks(self) -> None:
        """Have all of them log where they are: for a test that has failed, maybe because one hangs."""
        for server in self._servers:
            await server.process.tell_stacks()

    async def close(self) -> None:
        await self._stack.aclose()

    def server(self, index: int, *, tensor_parallel: int = 1) -> AbstractAsyncContextManager[ChildServer]:
        """One of the caller's own, number `index` on this machine."""
        config = configuration.from_dict(
            {
                "model": SCRATCH,
                "limits": {"start_seconds": START_SECONDS, "update_seconds": GROUP_SECONDS},
                "gserver": {
                    "engine": "sglang",
                    "max_context": MAX_CONTEXT,
                    "max_running": MAX_RUNNING,
                    "sglang": {
                        "python": sglang_python() or "",
                        "tensor_parallel": tensor_parallel,
                    },
                },
            }
        )
        return sglang_server(
            config.gserver,
            config.limits,
            index=index,
            model_dir=ensure_checkpoint(config, cache=self._folder / "cache"),
            device="cpu",
            dtype="float32",
            seed=1,
            weight_version="of nobody",
            prompt_cache=True,
            keys=GserverKeys(KEY, KEY),
        )
