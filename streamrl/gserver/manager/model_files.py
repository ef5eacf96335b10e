"""The run's model for hosts that do not have it: the files of the folder that `model.path` names on the manager's host.

They are asked for once for each host, in parts, and read in threads. Nothing outside of that folder can be asked for.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from pathlib import Path

from streamrl.config import Config
from streamrl.errors import PeerError
from streamrl.models import named_folder, weights_fingerprint
from streamrl.transport.control import ModelFile, ModelListing, ModelPart

PART_BYTES = 8 * 2**20
SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja")
"""Endings of a checkpoint's files that are given out; never those of pickles."""


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
        found = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
        files = [ModelFile(name=path.name, size=path.stat().st_size) for path in found]
        return ModelListing(files=files, fingerprint=weights_fingerprint(folder))

    @property
    def _existing(self) -> Path:
        if self._folder is None or not self._folder.is_dir():
            raise PeerError(f"the manager's host does not have the model either: model.path there is {self._folder}")
        return self._folder

    def _part(self, name: str, begin: int) -> ModelPart:
        if name not in (file.name for file in self._listing.files):
            raise PeerError(f"the model has no file {name!r}")
        with (self._existing / name).open("rb") as opened:
            opened.seek(begin)
            return ModelPart(opened.read(PART_BYTES))
