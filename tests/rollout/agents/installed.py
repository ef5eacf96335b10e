"""Where verifiers is installed, if it is: STREAMRL_VERIFIERS_PYTHON, or `make verifiers`' environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TASKSETS = Path(__file__).parent / "tasksets"


def needs_verifiers() -> str:
    """Return an interpreter that has verifiers; skips the test where there is none."""
    made = ROOT / ".venv-verifiers" / "bin" / "python"
    named = os.environ.get("STREAMRL_VERIFIERS_PYTHON") or (str(made) if made.exists() else "")
    if not named:
        pytest.skip("verifiers is not installed: make verifiers")
    return named
