"""Importing what is large, without what makes that slow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Do not look for cyclic garbage meanwhile; what was made is not looked through later either.

    The modules of torch and transformers are millions of objects that stay. To look through them again and again
    as they come into being is a third of the time that their import takes.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
