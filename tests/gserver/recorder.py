"""A CPU in the place of the device that records decode steps: recording a computation is to keep it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from streamrl.gserver.embedded.graphs import DeviceEvent, GraphedModel, HostBuffers, Replay
from streamrl.gserver.embedded.model import KVCache


class Recorder:
    """Counts recorded computations."""

    pinned = False

    def __init__(self, *, fails: bool = False) -> None:
        self.recorded = 0
        self.fails = fails
        self.late: list[Replay] = []
        """Launched computations that are not made yet, in order."""

    def __call__(self, compute: Replay) -> Replay:
        if self.fails:
            raise RuntimeError("no graphs here")
        self.recorded += 1
        compute()
        return compute

    def event(self) -> DeviceEvent:
        return LateEvent(self)

    def catch_up(self) -> None:
        while self.late:
            self.late.pop(0)()


class LateEvent:
    """Waits until all is computed that was launched before it."""

    def __init__(self, device: Recorder) -> None:
        self._device = device
        self.awaited = 0
        """Number of launched steps after which it will be set."""

    def record(self) -> None:
        self.awaited = max(0, self.awaited - 1)

    def synchronize(self) -> None:
        while self.awaited:
            self._device.late.pop(0)()


class LateModel(GraphedModel):
    """Computes a launched step as late as a GPU may: once it is awaited, or before a later operation on the cache.

    The host's buffers are read and written only then.
    """

    def __init__(self, *args: Any, cache: KVCache, record: Recorder, **settings: Any) -> None:
        super().__init__(*args, cache=cache, record=record, **settings)
        self._recorder = record
        for name in ("reserve", "copy", "clear", "take", "put"):
            setattr(cache, name, _after(record, getattr(cache, name)))
        for name in ("extend", "decode"):
            setattr(self, name, _after(record, getattr(self, name)))

    def _enqueue(self, buffers: HostBuffers, size: tuple[int, int], *, followers: int) -> bool:
        assert isinstance(buffers.done, LateEvent)
        buffers.done.awaited += 1
        self._recorder.late.append(partial(self._compute, self.parameters, buffers, size, followers))
        return True

    def _compute(self, parameters: Any, buffers: HostBuffers, size: tuple[int, int], followers: int) -> None:
        present, self.parameters = self.parameters, parameters
        super()._enqueue(buffers, size, followers=followers)
        self.parameters = present


def _after(device: Recorder, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **settings: Any) -> Any:
        device.catch_up()
        return method(*args, **settings)

    return call
