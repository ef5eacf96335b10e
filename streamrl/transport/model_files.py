"""The run's first weights on a host that does not have them: the manager gives out the files of the folder that
`model.path` names on its host, and other hosts fetch them.

They are asked for once for each host, in parts, and read in threads. Nothing outside of that folder can be asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

from streamrl.config import Config
from streamrl.errors import ModelError, PeerError
from streamrl.local_cache import cache_home
from streamrl.models import check_checkpoint, made, named_folder, weights_fingerprint
from streamrl.transport.control import ModelFile, ModelListing, ModelPart
from streamrl.transport.manager_client import ControlClient

log = logging.getLogger(__name__)

PART_BYTES = 8 * 2**20
SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")
"""Endings of a checkpoint's files that are given out; never those of pickles."""
CALL_SECONDS = 60.0
"""For one part."""
TELL_SECONDS = 15.0
"""How often it is told how much has come."""


def _given_out(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def _fingerprint(folder: Path) -> str:
    """Return what copies of the files have alike, and others have not but by chance: a change to the tokenizer, the
    chat template or the tokens that end a response makes another model of the same weights."""
    found = blake2b(weights_fingerprint(folder).encode(), digest_size=8)
    for path in _given_out(folder):
        if path.suffix != ".safetensors":
            found.update(f"{path.name} {path.stat().st_size}".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


# --- at the manager ---


class ModelFiles:
    """The folder's files, read when they are asked for."""

    def __init__(self, config: Config) -> None:
        self._folder = named_folder(config)

    async def listing(self) -> ModelListing:
        """Return what there is. Raises `PeerError` where the manager's host does not have the model either."""
        return await asyncio.to_thread(lambda: self._listing)

    async def part(self, name: str, begin: int) -> ModelPart:
        """Return at most `PART_BYTES` of a file from byte `begin` on. Raises `PeerError` for one that is not there."""
        return await asyncio.to_thread(self._part, name, begin)

    @cached_property
    def _listing(self) -> ModelListing:
        folder = self._existing
        files = [ModelFile(name=path.name, size=path.stat().st_size) for path in _given_out(folder)]
        return ModelListing(files=files, fingerprint=_fingerprint(folder))

    @property
    def _existing(self) -> Path:
        if self._folder is None or not self._folder.is_dir():
            raise PeerError(f"the manager's host does not have the model either: model.path there is {self._folder}")
        return self._folder

    def _part(self, name: str, begin: int) -> ModelPart:
        if name not in (file.name for file in self._listing.files):
            raise PeerError(f"the model has no file {name!r}", status=404)  # asking again does not help
        with (self._existing / name).open("rb") as opened:
            opened.seek(begin)
            return ModelPart(opened.read(PART_BYTES))


# --- on another host ---


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
    client = ControlClient.of(config, manager_url, timeout=CALL_SECONDS)
    try:
        listing = await client.model(patience=config.manager.join_timeout_seconds)
    finally:
        await client.close()

    def fetch(folder: Path) -> None:
        log.info("fetching the model from the manager at %s: %.0f MiB", manager_url, listing.bytes / 2**20)
        asyncio.run(_fetch(config, manager_url, listing, folder))
        check_checkpoint(folder)
        if _fingerprint(folder) != listing.fingerprint:
            raise ModelError(f"the model that the manager at {manager_url} sent is not the one that it has; try again")

    return await asyncio.to_thread(made, cache / f"model-{listing.fingerprint}", fetch)


async def _fetch(config: Config, manager_url: str, listing: ModelListing, folder: Path) -> None:
    client = ControlClient.of(config, manager_url, timeout=CALL_SECONDS)
    came, told = 0, time.monotonic()
    try:
        for file in listing.files:
            name = Path(file.name).name  # whatever the manager calls it, it lies in this folder
            with (folder / name).open("wb") as target:
                while (begin := target.tell()) < file.size:
                    part = await client.model_part(file.name, begin)
                    if not part.content:
                        raise ModelError(f"{file.name} of the manager's model ends at {begin} of {file.size} bytes")
                    target.write(part.content)
                    came += len(part.content)
                    if time.monotonic() - told > TELL_SECONDS:
                        told = time.monotonic()
                        log.info("%.0f of %.0f MiB of the model have come", came / 2**20, listing.bytes / 2**20)
    finally:
        await client.close()
