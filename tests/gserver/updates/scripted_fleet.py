"""A manager with scripted gservers that serve."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gserver.harness import Run, joined
from tests.gserver.scripted import Fault, ScriptedGserver

TIMEOUT = 1.5


@asynccontextmanager
async def fleet(
    folder: Path, count: int = 2, *, staged: bool = True, timeout: float = TIMEOUT, **weights: Any
) -> AsyncIterator[tuple[Run, list[ScriptedGserver]]]:
    """A run whose gservers serve; what they are asked for from now on is in their `calls`."""
    limits = {"update_seconds": timeout}
    async with joined(folder, count, scripted_as={"staged": staged}, weights=weights, limits=limits) as (run, gservers):
        for gserver in gservers:
            gserver.calls.clear()
        yield run, gservers


def calls_of_an_update(gserver: ScriptedGserver) -> list[str]:
    return [path for path in gserver.calls if path not in ("/server_info", "/model_info")]


def each(faults: Sequence[Fault], path: str, *others: str) -> pytest.MarkDecorator:
    """Each fault at one step, and one of them at the others: what a fault means does not depend on the step."""
    found = [*((path, fault) for fault in faults), *((other, "error") for other in others)]
    return pytest.mark.parametrize(("path", "fault"), found)
