"""A publisher in a process of its own, which does what it is told and answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tests.forked import forking

ANSWER_SECONDS = 180.0


class Rank0:
    """The test's end."""

    def __init__(self, process: BaseProcess, connection: Connection[Any, Any]) -> None:
        self._process = process
        self._connection = connection
        self.group = ""
        """Name of the group that it has formed last."""
        self._formed = 0

    async def form(self) -> int:
        """Begin to form a new group; return the port of its store."""
        self._formed += 1
        self.group = f"weights-{self._formed}"
        port: int = await self.ask("port")
        self.tell("form", name=self.group)
        return port

    def tell(self, do: str, **arguments: Any) -> None:
        self._connection.send({"do": do, **arguments})

    async def answer(self) -> Any:
        return await asyncio.to_thread(self._receive)

    async def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return await self.answer()

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.join)

    def _receive(self) -> Any:
        assert self._connection.poll(ANSWER_SECONDS), "the publisher does not answer"
        return self._connection.recv()


@asynccontextmanager
async def rank0() -> AsyncIterator[Rank0]:
    context = forking()
    ours, its = context.Pipe()
    process = context.Process(target=_publish, args=(its,), daemon=True)  # none outlives pytest
    await asyncio.to_thread(process.start)
    its.close()
    publisher = Rank0(process, ours)
    try:
        yield publisher
    finally:
        await publisher.kill()
        ours.close()


def _publish(commands: Connection[Any, Any]) -> None:
    from safetensors.torch import load_file

    from streamrl.transport.collective import broadcasts, destroy_group, form_group, open_store

    store = open_store("127.0.0.1")
    group: Any = None
    while True:
        command = commands.recv()
        match command["do"]:
            case "port":
                commands.send(store.port)
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
                commands.send("formed")
            case "send":
                weights = load_file(command["file"])
                for name in command["names"]:
                    list(broadcasts([(name, weights[name])], group))
                commands.send("sent")
