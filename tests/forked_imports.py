"""What the processes of `tests.forked` find loaded. Nothing here may compute: threads do not survive a fork."""

from __future__ import annotations

import importlib
import importlib.util
import os

from streamrl.hooks import without_garbage_collection
from streamrl.launch.processes import COMPONENTS, thread_environment

MODULES = [
    "tests.trainer.roles.test_actor",
    "tests.trainer.backends.common",
    "streamrl.trainer.worker.assembly",
    "streamrl.cli",
    "streamrl.launch.display",
    "streamrl.launch.local",
    "streamrl.launch.role",
    "streamrl.report.summary",
    *(component.partition(":")[0] for component in COMPONENTS.values()),
]
MEGATRON = "streamrl.trainer.backends.megatron.model"

os.environ.update(thread_environment(1))  # as in a process of a run: libraries read these when they are loaded
with without_garbage_collection():
    for name in MODULES:
        importlib.import_module(name)
    if importlib.util.find_spec("megatron"):
        importlib.import_module(MEGATRON)
