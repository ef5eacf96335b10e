"""What a rollout worker finds out about its configuration before it asks for work."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from streamrl import config as configuration
from streamrl.errors import ConfigError
from streamrl.models import ensure_checkpoint, vocab_size
from streamrl.rollout.activity import Activity
from streamrl.rollout.process import _open_workflow, load_data
from streamrl.transport.addresses import Reach
from tests.rollout.characters import make_chat

SCRATCH = {"alphabet": "0123= ", "hidden_size": 16, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 16}
MODEL = {"path": "scratch", "scratch": SCRATCH}


def test_a_stop_string_that_the_model_cannot_say_is_refused(tmp_path: Path) -> None:
    config = configuration.from_dict(
        {
            "model": MODEL,
            "data": {"source": "python", "path": "streamrl.rollout.tasks:copy_digits"},
            "rollout": {"sampling": {"stop": ["=0", "END"]}},
        }
    )
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop has 'END', which the model has no tokens for"):
        load_data(config, ensure_checkpoint(config, cache=tmp_path))


def joined_at(reach: Reach, at_exit: AsyncExitStack) -> Any:
    return SimpleNamespace(
        membership=SimpleNamespace(role="rollout", index=0), reach=reach, activity=Activity(idle=""), at_exit=at_exit
    )


async def status_at(url: str, **headers: str) -> int:
    """What the gateway answers to somebody without an episode's key: 401, or 403 if it is not known by that name."""
    async with aiohttp.ClientSession() as agent, agent.get(f"{url}/v1/models", headers=headers) as answer:
        return answer.status


async def test_agents_elsewhere_may_ask_by_the_name_that_they_are_told(tmp_path: Path) -> None:
    config = configuration.from_dict({"model": MODEL, "rollout": {"agent": {"remote": True, "renderer": "template"}}})
    async with AsyncExitStack() as at_exit:
        joined = joined_at(Reach(announced="rollout.example", local="127.0.0.1"), at_exit)
        model_dir = ensure_checkpoint(config, cache=tmp_path)
        workflow: Any = await _open_workflow(config, joined=joined, chat=make_chat(), model_dir=model_dir)
        told = urlsplit(workflow.url)
        assert told.hostname == "rollout.example"
        assert await status_at(f"http://127.0.0.1:{told.port}", Host=told.netloc) == 401
        assert workflow.gateway.vocab_size == vocab_size(model_dir)
