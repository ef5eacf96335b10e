"""A publication that comes to nothing, over a manager and weights that are scripted here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from streamrl.config import Config
from streamrl.errors import PeerLost
from streamrl.trainer.worker.publisher import Carriers, Publisher


class Source:
    """Weights whose other ranks wait to hear that the version has ended."""

    def __init__(self) -> None:
        self.ended = 0

    def specs(self) -> list[tuple[str, tuple[int, ...]]]:
        return [("a", (2, 3))]

    def end(self) -> None:
        self.ended += 1


class Gone:
    """A manager that does not say where gservers are."""

    async def gserver_places(self) -> Any:
        raise PeerLost("the manager is gone")


class Silent:
    """A manager that is asked where gservers are, and never replies."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def gserver_places(self) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


def publisher(client: Any) -> Publisher:
    carriers = Carriers(None, near=object())  # type: ignore[arg-type]
    return Publisher(client=client, config=Config(), carriers=carriers, in_thread=asyncio.to_thread)


async def test_other_ranks_hear_of_the_end_when_the_manager_is_gone() -> None:
    source = Source()
    with pytest.raises(PeerLost, match="the manager is gone"):
        await publisher(Gone()).publish(1, source)  # type: ignore[arg-type]
    assert source.ended == 1


async def test_other_ranks_hear_of_the_end_when_the_publication_is_cancelled() -> None:
    source, manager = Source(), Silent()
    publication = asyncio.create_task(publisher(manager).publish(1, source))  # type: ignore[arg-type]
    await manager.asked.wait()
    publication.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publication
    assert source.ended == 1
