"""Modules of streamrl in the interpreter of another environment, which has msgspec but not what streamrl needs else."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import streamrl

_BEGIN = """
import importlib.util, runpy, sys
spec = importlib.util.spec_from_file_location("streamrl", sys.argv.pop(1))
sys.modules["streamrl"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
"""
"""The package is loaded from its own folder; nothing else that lies beside it comes into the path of the other
interpreter, whose packages may have other versions."""


def command(python: str, module: str) -> list[str]:
    """Return what runs `module` of streamrl in the interpreter `python`; empty: in this one."""
    if not python:
        return [sys.executable, "-m", module]
    return [python, "-c", _BEGIN, str(Path(streamrl.__file__).resolve()), module]


def environment(python: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with the programs of the environment of `python` first in the path."""
    if not python:
        return dict(variables)
    return {**variables, "PATH": os.pathsep.join([str(Path(python).absolute().parent), variables.get("PATH", "")])}
