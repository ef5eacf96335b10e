"""What several backends' tests begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.backends.reference import save_models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all models of `save_models`."""
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder
