"""The start of an engine: what it gets, and its HTTP server if it computes in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import torch
from aiohttp import web

from streamrl.config import Config
from streamrl.device import resolve_device, resolve_dtype
from streamrl.gserver.server.engine import Engine, Text
from streamrl.gserver.server.http import Server
from streamrl.records import progress
from streamrl.records.lineage import label_of
from streamrl.transport.addresses import LOOPBACK, Reach, url_of
from streamrl.transport.credentials import GserverKeys
from streamrl.transport.generation import INITIAL_WEIGHT_VERSION
from streamrl.transport.http import Hosts
from streamrl.transport.secret import Secret, encrypts
from streamrl.transport.tls import server_context
from streamrl.waits import CLOSE_SECONDS


class GserverLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is started with."""

    config: Config
    index: int
    """The gserver's index."""
    model_dir: Path
    """The checkpoint that it serves first."""
    reach: Reach = LOOPBACK
    keys: GserverKeys = GserverKeys()
    """The keys that callers must present."""
    secret: Secret | None = None
    """The run's secret, for a TLS certificate."""

    @property
    def device(self) -> torch.device:
        """The device on which it computes, the first one if it has several ranks."""
        return resolve_device(self.config.run.device, index=self.index, each=self.config.gserver.ranks)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its weights."""
        return resolve_dtype(self.config.gserver.dtype, self.device)

    @property
    def encryption(self) -> Secret | None:
        """The secret if connections are encrypted."""
        return self.secret if self.secret is not None and encrypts(self.config, self.reach.local) else None

    @property
    def seed(self) -> int:
        """A seed of its own."""
        return self.config.run.seed * 2**20 + self.index

    @property
    def version(self) -> str:
        """The name of the first weights."""
        begun = self.config.run.resume_from  # the position in the data does not matter here: [data] is not compared
        if begun is None:
            return INITIAL_WEIGHT_VERSION
        reached = progress.read(Path(begun))
        return label_of(reached.policy_version, reached.lineage)

    @property
    def first_adapter(self) -> Path | None:
        """The adapter that a run with [model.lora] resumes from; None if it begins without one."""
        begun = self.config.run.resume_from
        return Path(begun).expanduser().absolute() if begun else None


@asynccontextmanager
async def behind_http(engine: Engine, launch: GserverLaunch, *, text: Text) -> AsyncIterator[tuple[Engine, str]]:
    """Start `engine`; yield it, and the URL of its HTTP server."""
    config, reach, encryption = launch.config, launch.reach, launch.encryption
    tls = server_context(encryption, config.security) if encryption is not None else None
    server = Server(engine, text=text)
    await engine.start()
    try:
        runner = web.AppRunner(
            server.application(keys=launch.keys, hosts=Hosts([reach.announced, *config.security.host_names])),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=CLOSE_SECONDS,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, reach.local, 0, ssl_context=tls)
            await site.start()
            scheme = "http" if tls is None else "https"
            yield engine, url_of(reach.announced, runner.addresses[0][1], scheme=scheme)
        finally:
            await asyncio.shield(runner.cleanup())
    finally:
        await engine.close()
