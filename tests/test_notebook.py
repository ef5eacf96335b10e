"""The notebook of the examples, executed by a kernel as a user would."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.e2e.harness import COPY_SCRATCH, ROOT
from tests.processes import assert_ended, below

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


@pytest.mark.timeout(600)
def test_the_notebook_runs_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shutil.copy(COPY_SCRATCH, tmp_path)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs"), "kept outputs grow old"
        cell.source = cell.source.replace('"run.total_train_steps": 60', '"run.total_train_steps": 3')
    before = below()
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    assert_ended(below() - before)
    text = str(notebook.cells)
    assert "image/png" in text
    assert re.search(r"0 groups lost in 3 steps", text)
