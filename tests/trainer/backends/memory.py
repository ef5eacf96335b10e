"""How much memory this process has needed, as the kernel counts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def resident(field: str) -> int:
    """`VmRSS` or `VmHWM` in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


class Peak:
    """Most memory above what there was at the beginning."""

    bytes = 0


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Tell how much more memory than at its beginning the block has needed at its worst."""
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
    except OSError:
        pytest.skip("this kernel does not let a process follow its own peak of memory")
    before = resident("VmRSS")
    found = Peak()
    yield found
    found.bytes = resident("VmHWM") - before
