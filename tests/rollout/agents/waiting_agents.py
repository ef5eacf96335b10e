"""An agent that asks nobody, for tests of the process in which it runs."""

from __future__ import annotations

import asyncio
import time
from typing import Any


async def wait(task: dict[str, Any], policy: Any) -> float:
    """Block the process for `block` seconds, and then wait for `wait` more."""
    time.sleep(task["block"])  # noqa: ASYNC251 (so it blocks)
    await asyncio.sleep(task["wait"])
    return 1.0
