"""Where SGLang and vLLM are installed, if they are.

In the order of STREAMRL_SGLANG_PYTHON (STREAMRL_VLLM_PYTHON), this interpreter, and the environment that
`make sglang-cpu` (`make vllm-cpu`) makes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def sglang_python() -> str | None:
    """An interpreter that has SGLang."""
    return _python("sglang")


def vllm_python() -> str | None:
    """An interpreter that has vLLM."""
    return _python("vllm")


def _python(package: str) -> str | None:
    named = os.environ.get(f"STREAMRL_{package.upper()}_PYTHON")
    if named:
        return named
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    made = ROOT / f".venv-{package}" / "bin" / "python"
    return str(made) if (made.parents[1] / ".installed").exists() else None
