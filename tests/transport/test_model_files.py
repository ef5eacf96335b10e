"""A host without the run's model gets it from the manager's, once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from streamrl.config import Config, from_dict
from streamrl.errors import PeerError
from streamrl.models import ensure_checkpoint
from streamrl.transport import model_files
from streamrl.transport.model_files import fetched_model, is_elsewhere
from tests.gserver.harness import managed, small_config

SCRATCH = {"path": "scratch", "scratch": {"hidden_size": 32, "heads": 2, "kv_heads": 1, "head_dim": 16}}


def at(config: Config, folder: Path) -> Config:
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(folder)))


async def test_a_host_without_the_model_fetches_a_whole_copy_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "PART_BYTES", 1000)
    made = ensure_checkpoint(from_dict({"model": SCRATCH}), cache=tmp_path / "made")
    (made / "optimizer.bin").write_bytes(b"no part of a checkpoint")
    config = at(small_config(tmp_path), made)
    here = at(config, tmp_path / "nowhere")
    assert is_elsewhere(here)
    assert not is_elsewhere(config)
    assert here.digest() == config.digest()
    async with managed(config) as run:
        copies = [
            await asyncio.to_thread(fetched_model, here, manager_url=run.url, cache=tmp_path / "cache")
            for _ in range(2)
        ]
        assert copies[0] == copies[1]
        for file in made.iterdir():
            copy = copies[0] / file.name
            assert copy.exists() == (file.suffix != ".bin")
            assert file.suffix == ".bin" or copy.read_bytes() == file.read_bytes()
        for name in ("../made", "optimizer.bin", "/etc/passwd", ""):
            with pytest.raises(PeerError, match="the model has no file"):
                await run.client.model_part(name, 0)


async def test_a_copy_from_before_a_small_file_was_changed_is_not_taken(tmp_path: Path) -> None:
    """As long as it was, and beside the same weights."""
    made = ensure_checkpoint(from_dict({"model": SCRATCH}), cache=tmp_path / "made")
    config = at(small_config(tmp_path), made)
    here = at(config, tmp_path / "nowhere")
    for tokens in ("[1]", "[2]"):
        (made / "generation_config.json").write_text(f'{{"eos_token_id": {tokens}}}')
        async with managed(config) as run:
            copy = await asyncio.to_thread(fetched_model, here, manager_url=run.url, cache=tmp_path / "cache")
        assert tokens in (copy / "generation_config.json").read_text()


async def test_it_is_fetched_from_a_manager_that_encrypts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMRL_SECRET", "0123456789abcdef")
    made = ensure_checkpoint(from_dict({"model": SCRATCH}), cache=tmp_path / "made")
    config = at(small_config(tmp_path, security={"encryption": "off"}, limits={"start_seconds": 5}), made)
    async with managed(config) as run:
        elsewhere = run.url.replace("127.0.0.1", "0.0.0.0")  # the same socket, by an address that is no loopback one
        here = at(config, tmp_path / "nowhere")
        copy = await asyncio.to_thread(fetched_model, here, manager_url=elsewhere, cache=tmp_path / "cache")
        assert (copy / "model.safetensors").exists()


async def test_where_the_managers_host_lacks_it_too_it_is_said(tmp_path: Path) -> None:
    config = at(small_config(tmp_path, limits={"start_seconds": 5}), tmp_path / "nowhere")
    async with managed(config) as run:
        with pytest.raises(PeerError, match=r"the manager's host does not have the model either: .*nowhere"):
            await asyncio.to_thread(fetched_model, config, manager_url=run.url, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))


def test_what_is_made_or_resumed_is_not_fetched(tmp_path: Path) -> None:
    assert not is_elsewhere(from_dict({"model": SCRATCH}))
    assert not is_elsewhere(from_dict({"model": {"path": str(tmp_path / "no")}, "run": {"resume_from": "runs/a"}}))
