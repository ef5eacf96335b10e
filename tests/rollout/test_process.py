"""What a rollout worker finds out about its configuration before it asks for work."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl import config as configuration
from streamrl.errors import ConfigError
from streamrl.models import ensure_checkpoint
from streamrl.rollout.process import load_data

SCRATCH = {"alphabet": "0123= ", "hidden_size": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 16}


def test_a_stop_string_that_the_model_cannot_say_is_refused(tmp_path: Path) -> None:
    config = configuration.from_dict(
        {
            "model": {"path": "scratch", "scratch": SCRATCH},
            "data": {"source": "python", "path": "streamrl.rollout.tasks:copy_digits"},
            "rollout": {"sampling": {"stop": ["=0", "END"]}},
        }
    )
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop has 'END', which the model cannot say"):
        load_data(config, ensure_checkpoint(config, cache=tmp_path))
