"""A process that knows nothing of the end of the others."""

from __future__ import annotations

import importlib
import sys
import time
from multiprocessing.connection import Connection

from sgl_kernel import any_operator

from sglang.srt.utils.common import init_custom_process_group


def schedule(tell: Connection) -> None:
    """Tell what is different here from SGLang's own code."""
    assert callable(any_operator)
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    tell.send(
        {
            "group": str(init_custom_process_group()),
            "opens_store": rendezvous.TCPStore.__module__,
            "patched": sorted(finder._name for finder in sys.meta_path if type(finder).__name__ == "AfterImport"),
        }
    )
    time.sleep(600)
