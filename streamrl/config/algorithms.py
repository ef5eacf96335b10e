"""The names of the built-in losses and advantages: the modules of `trainer/algorithms` that define one.

The modules are not imported, since most of them need torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parents[1] / "trainer" / "algorithms"


def module_of(name: str) -> str:
    """Return the module of the built-in algorithm `name`."""
    return name.replace("++", "_pp").replace("-", "_")


def names_of(kind: Literal["loss", "advantage"]) -> list[str]:
    """Return the names of the modules with a function `kind`."""
    found = (file.stem for file in FOLDER.glob("*.py") if f"\ndef {kind}(" in file.read_text())
    return sorted(stem.replace("_pp", "++").replace("_", "-") for stem in found)
