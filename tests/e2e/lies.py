"""Processes of a run that misbehave: a gserver that keeps its old weights, which no checksum can see, and model workers
whose disk is slow.

Every process of the run calls these (`harness.calling`); its command line decides whether they apply to it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def gserver_1_keeps_its_weights() -> None:
    """It makes new weights ready, says that it serves them, and goes on with those that it has."""
    if "gserver" not in sys.orig_argv or sys.orig_argv[sys.orig_argv.index("--index") + 1] != "1":
        return
    from streamrl.gserver.embedded.adapters import Adapters
    from streamrl.gserver.embedded.weights import DoubleBufferedWeights

    def swap(self: Any) -> Any:
        self.make_ready()
        return self.served

    DoubleBufferedWeights.swap = Adapters.swap = swap  # type: ignore[method-assign]


def checkpoints_take_long() -> None:
    """The files of a checkpoint reach the disk after five minutes."""
    if "model-worker" not in sys.orig_argv:
        return
    from streamrl.trainer.worker import checkpoint

    def slow(folder: Path) -> None:
        time.sleep(300)

    checkpoint.all_to_disk = slow
