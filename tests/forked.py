"""Processes of tests, forked from one that has loaded torch, transformers and Megatron already.

There is one such fork server for each process of pytest; it starts with the first call. Loading them anew in each
process would cost more than most tests.
"""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.context import ForkServerContext


def forking() -> ForkServerContext:
    """Use it as the module `multiprocessing`. What is handed to a process is pickled, as with `spawn`."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.forked_imports"])
    return context
