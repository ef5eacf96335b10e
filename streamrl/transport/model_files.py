"""The run's initial weights for hosts without them: the manager serves the files of the folder that `model.path` names
on its host, and other hosts fetch them.

Each host fetches the files once, in parts; the manager reads them in threads. No file outside that folder is served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

from streamrl.config import Config
from streamrl.disk import cache_home
from streamrl.errors import ModelError, PeerError
from streamrl.models import check_checkpoint, made, named_folder, weights_fingerprint
from streamrl.transport.control import ModelFile, ModelListing, ModelPart
from streamrl.transport.manager_client import ControlClient

log = logging.getLogger(__name__)

PART_BYTES = 8 * 2**20
SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")
"""Endings of a checkpoint's files that are served; pickles never are."""
CALL_SECONDS = 60.0
"""Timeout for fetching one part."""
LOG_SECONDS = 15.0
"""Interval at which the progress is logged."""


def _given_out(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())


def _fingerprint(folder: Path) -> str:
    """Return a fingerprint that is equal for copies of the files and, except by chance, different for other files.

    It includes the tokenizer, the chat template and the stop tokens: a change to these makes another model of the same
    weights."""
    found = blake2b(weights_fingerprint(folder).encode(), digest_size=8)
    for path in _given_out(folder):
        if path.suffix != ".safetensors":
            found.update(f"{path.name} {path.stat().st_size}".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


# --- at the manager ---


class ModelFiles:
    """The folder's files, read on request."""

    def __init__(self, config: Config) -> None:
        self._folder = named_folder(config)

    async def listing(self) -> ModelListing:
        """Return the list of files. Raises `PeerError` if the manager's host does not have the model either."""
        return await asyncio.to_thread(lambda: self._listing)

    async def part(self, name: str, begin: int) -> ModelPart:
        """Return at most `PART_BYTES` of a file from byte `begin` on. Raises `PeerError` if the file is missing."""
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
            raise PeerError(f"the model has no file {name!r}", status=404)  # a retry would not help
        with (self._existing / name).open("rb") as opened:
            opened.seek(begin)
            return ModelPart(opened.read(PART_BYTES))


# --- on another host ---


def is_elsewhere(config: Config) -> bool:
    """Whether `model.path` names a folder that this host does not have."""
    folder = named_folder(config)
    return folder is not None and not folder.exists()


def fetched_model(config: Config, *, manager_url: str, cache: Path | None = None) -> Path:
    """Return a copy of the run's model from the manager's host; fetch it unless an earlier copy exists here.

    Raises `StreamRLError` if the manager does not have it, or cannot be reached, and `ModelError` if the fetched files
    are not a whole checkpoint.
    """
    with asyncio.Runner() as runner:
        client = ControlClient.of(config, manager_url, timeout=CALL_SECONDS)
        try:
            listing = runner.run(client.model(patience=config.limits.start_seconds))

            def fetch(folder: Path) -> None:
                log.info("fetching the model from the manager at %s: %.0f MiB", manager_url, listing.bytes / 2**20)
                runner.run(_fetch(client, listing, folder))
                check_checkpoint(folder)
                if _fingerprint(folder) != listing.fingerprint:
                    raise ModelError(
                        f"the model that the manager at {manager_url} sent is not the one that it has; try again"
                    )

            return made((cache or cache_home()) / f"model-{listing.fingerprint}", fetch)
        finally:
            runner.run(client.close())


async def _fetch(client: ControlClient, listing: ModelListing, folder: Path) -> None:
    came, logged = 0, time.monotonic()
    for file in listing.files:
        name = Path(file.name).name  # no name from the manager leads out of this folder
        with (folder / name).open("wb") as target:
            while (begin := target.tell()) < file.size:
                part = await client.model_part(file.name, begin)
                if not part.content:
                    raise ModelError(f"{file.name} of the manager's model ends at {begin} of {file.size} bytes")
                target.write(part.content)
                came += len(part.content)
                if time.monotonic() - logged > LOG_SECONDS:
                    logged = time.monotonic()
                    log.info("%.0f of %.0f MiB of the model have come", came / 2**20, listing.bytes / 2**20)
