"""Where SGLang is installed, if it is: STREAMRL_SGLANG_PYTHON, this interpreter, or `make sglang-cpu`'s."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def sglang_python() -> str | None:
    """An interpreter that has SGLang."""
    named = os.environ.get("STREAMRL_SGLANG_PYTHON")
    if named:
        return named
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    made = ROOT / ".venv-sglang" / "bin" / "python"
    return str(made) if made.exists() else None
