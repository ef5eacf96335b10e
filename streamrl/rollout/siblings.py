"""Requests of siblings that are made at the same moment travel as one.

One HTTP request does for all, so a group of short responses costs both sides hardly more than one of them; each
sibling is answered when it is done, so whoever counts what a gserver has to do sees it end.
"""

from __future__ import annotations

import asyncio

from streamrl.transport.generation import GenerateReply, GenerateRequest, GenerationClient

_Waiting = tuple[GenerateRequest, "asyncio.Future[GenerateReply]"]


class SiblingRequests:
    """Collects the requests of one turn of the event loop; answers each with its own reply.

    Those that are not answered yet fail together.
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

        def cancel_if_nobody_waits(ended: asyncio.Future[GenerateReply]) -> None:
            if all(future.done() for _, future in batch) and any(future.cancelled() for _, future in batch):
                task.cancel()  # else its end is on its way, and the connection serves the next batch

        for _, future in batch:
            future.add_done_callback(cancel_if_nobody_waits)

    async def _ask(self, url: str, batch: list[_Waiting]) -> None:
        def answer(index: int, reply: GenerateReply) -> None:
            future = batch[index][1]
            if not future.done():
                future.set_result(reply)

        try:
            await self._client.generate_batch(url, [request for request, _ in batch], answer)
        except Exception as error:  # handed on to every sibling
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
