"""What the processes of `tests.forked` find loaded. Nothing here may compute: threads do not survive a fork."""

from __future__ import annotations

import importlib
import importlib.util

from streamrl.importing import without_garbage_collection

MODULES = ["tests.trainer.roles.test_actor", "tests.trainer.backends.common", "streamrl.trainer.assembly"]
MEGATRON = "streamrl.trainer.backends.megatron.model"

with without_garbage_collection():
    for name in MODULES:
        importlib.import_module(name)
    if importlib.util.find_spec("megatron"):
        importlib.import_module(MEGATRON)
