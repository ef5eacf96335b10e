"""How a weight group is formed: with a default that streamrl replaces."""

from __future__ import annotations

from datetime import timedelta


def init_custom_process_group(backend: str = "gloo", timeout: timedelta | None = None, rank: int = -1) -> object:
    return backend, timeout, rank
