"""A publisher in a process of its own: commands as JSON lines on stdin, answers on stdout."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__)


class Rank0:
    """The test's end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.group = ""
        """Name of the group that it has formed last."""
        self._formed = 0

    async def form(self) -> int:
        """Begin to form a new group; return the port of its store."""
        self._formed += 1
        self.group = f"weights-{self._formed}"
        port: int = await self.ask("port")
        await self.tell("form", name=self.group)
        return port

    async def tell(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        await self._process.stdin.drain()

    async def answer(self) -> Any:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), 180)
        assert line, "the publisher has ended"
        return json.loads(line)

    async def ask(self, do: str, **arguments: Any) -> Any:
        await self.tell(do, **arguments)
        return await self.answer()

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def rank0() -> AsyncIterator[Rank0]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield Rank0(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main() -> None:
    import torch
    from safetensors.torch import load_file

    from streamrl.transport.collective import broadcast, destroy_group, form_group, open_store

    store = open_store("127.0.0.1")
    group: Any = None

    def answer(value: Any) -> None:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "port":
                answer(store.port)
            case "form":
                if group is not None:
                    destroy_group(group)
                group = form_group(
                    address="127.0.0.1",
                    port=store.port,
                    rank=0,
                    world_size=2,
                    name=command["name"],
                    backend="gloo",
                    timeout=30,
                    store=store,
                )
                answer("formed")
            case "send":
                weights = load_file(command["file"])
                tensors = [weights[name] for name in command["names"]]
                if command["flat"]:
                    tensors = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])]
                for tensor in tensors:
                    broadcast(tensor, group, what="weights")
                answer("sent")


if __name__ == "__main__":
    main()
