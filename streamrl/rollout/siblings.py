"""Requests of siblings that are made at the same moment travel as one.

A group is done when its last sibling is, so for siblings that only wait for each other one HTTP
request does for all: the gserver computes them together, and both sides handle one message.
"""

from __future__ import annotations

import asyncio

from streamrl.transport.generation import GenerateReply, GenerateRequest, GenerationClient

_Waiting = tuple[GenerateRequest, "asyncio.Future[GenerateReply]"]


class SiblingRequests:
    """Collects the requests of one turn of the event loop; answers each with its own reply.

    All of a batch are answered when the last is; they fail together, too.
    """

    def __init__(self, client: GenerationClient) -> None:
        self._client = client
        self._batches: dict[tuple[int, str], list[_Waiting]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    async def generate(self, group: object, url: str, request: GenerateRequest) -> GenerateReply:
        """Ask `url` together with what else is asked for `group` now."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[GenerateReply] = loop.create_future()
        key = (id(group), url)
        if key not in self._batches:
            self._batches[key] = []
            loop.call_soon(self._send, key)
        self._batches[key].append((request, future))
        return await future

    def _send(self, key: tuple[int, str]) -> None:
        batch = self._batches.pop(key)
        task = asyncio.get_running_loop().create_task(self._ask(key[1], batch), name=f"{len(batch)} siblings")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        for _, future in batch:
            future.add_done_callback(lambda _: task.cancel() if all(f.done() for _, f in batch) else None)

    async def _ask(self, url: str, batch: list[_Waiting]) -> None:
        try:
            replies = await self._client.generate_batch(url, [request for request, _ in batch])
        except Exception as error:  # handed on to every sibling
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), reply in zip(batch, replies, strict=True):
            if not future.done():
                future.set_result(reply)
