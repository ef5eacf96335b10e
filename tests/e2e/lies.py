"""Processes of a run that say that they serve new weights, and go on with the old ones. No checksum can see it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def have_lied(lie: Callable[[], None], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every Python that starts from now on call `lie`, which knows by the command line whom it concerns.

    `folder` is given a `sitecustomize.py`, so the run has to be a fresh one (`harness.start`).
    """
    (folder / "sitecustomize.py").write_text(f"from tests.e2e import lies\n\nlies.{lie.__name__}()\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))


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
