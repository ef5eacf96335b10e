"""The folder with the run's first weights on this host: its own, made here, or fetched from the manager once."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from streamrl.config import Config
from streamrl.errors import ModelError
from streamrl.local_cache import cache_home
from streamrl.models import check_checkpoint, made, named_folder, weights_fingerprint
from streamrl.transport.control import ModelListing
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import of_run_at

log = logging.getLogger(__name__)

CALL_SECONDS = 60.0
"""For one part."""


def is_elsewhere(config: Config) -> bool:
    """Whether `model.path` names a folder that this host does not have."""
    folder = named_folder(config)
    return folder is not None and not folder.exists()


def fetched_model(config: Config, *, manager_url: str, cache: Path | None = None) -> Path:
    """Return a copy of the run's model, which the manager's host has; it is fetched unless an earlier one is here.

    Raises `StreamRLError` when the manager does not have it, or cannot be reached, and `ModelError` when what has come
    is no whole checkpoint.
    """
    return asyncio.run(_fetched(config, manager_url, cache or cache_home()))


async def _fetched(config: Config, manager_url: str, cache: Path) -> Path:
    client = ControlClient(manager_url, secret=of_run_at(manager_url, config), timeout=CALL_SECONDS)
    try:
        listing = await client.model(patience=config.manager.join_timeout_seconds)
    finally:
        await client.close()

    def fetch(folder: Path) -> None:
        log.info("fetching the model from the manager at %s: %.0f MiB", manager_url, listing.bytes / 2**20)
        asyncio.run(_fetch(config, manager_url, listing, folder))
        check_checkpoint(folder)
        if weights_fingerprint(folder) != listing.fingerprint:
            raise ModelError(f"the model that the manager at {manager_url} sent is not the one that it has; try again")

    return await asyncio.to_thread(made, cache / f"model-{listing.fingerprint}", fetch)


async def _fetch(config: Config, manager_url: str, listing: ModelListing, folder: Path) -> None:
    client = ControlClient(manager_url, secret=of_run_at(manager_url, config), timeout=CALL_SECONDS)
    try:
        for file in listing.files:
            name = Path(file.name).name  # whatever the manager calls it, it lies in this folder
            with (folder / name).open("wb") as target:
                while (begin := target.tell()) < file.size:
                    part = await client.model_part(file.name, begin)
                    if not part.content:
                        raise ModelError(f"{file.name} of the manager's model ends at {begin} of {file.size} bytes")
                    target.write(part.content)
    finally:
        await client.close()
