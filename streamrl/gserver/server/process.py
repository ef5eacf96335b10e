"""One gserver process: engine, HTTP server, membership in the run."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path
from typing import cast

from streamrl.config import Config
from streamrl.cuda_memory import gpu_identity
from streamrl.device import resolve_device
from streamrl.errors import ConfigError
from streamrl.export import hugging_face_folder, merge_adapter
from streamrl.gserver.server.engine import ServedEngine
from streamrl.gserver.server.serving import GserverLaunch
from streamrl.hooks import load_object
from streamrl.models import weights_fingerprint
from streamrl.records import progress
from streamrl.transport.addresses import LOOPBACK, Reach, reach_towards
from streamrl.transport.credentials import GserverKeys
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.membership import Membership
from streamrl.transport.secret import Secret, of_run_at

log = logging.getLogger(__name__)

NO_KEYS = GserverKeys()


async def serve(config: Config, *, manager_url: str, index: int = 0, model_dir: Path, advertise: str = "") -> None:
    """Serve `model_dir` until the run is over.

    `advertise`: the address by which others reach this process; if empty, the one from which it reaches the manager.
    """
    reach = reach_towards(manager_url, advertise=advertise)
    secret = of_run_at(manager_url, config)
    if secret is None:
        raise ConfigError(
            f"gserver/{index} does not have the secret of the run at {manager_url}: set STREAMRL_SECRET or "
            "security.secret_file to what the manager has"
        )
    client = ControlClient.of(config, manager_url)
    try:
        keys = GserverKeys.of(config, secret, index)
        async with (
            first_weights(config, index=index, model_dir=model_dir) as first,
            running(config, index=index, model_dir=first, reach=reach, keys=keys, secret=secret) as served,
        ):
            engine, url = served
            membership = Membership(
                client,
                role="gserver",
                index=index,
                address=url,
                config=config,
                model=weights_fingerprint(model_dir),
                begins_from=progress.identity(config),
                stats=engine.stats,
                gpu=_gpu_of_weights(config, index),
            )
            await membership.join(patience=config.limits.start_seconds)
            try:
                log.info("%s serves %s with the %s engine at %s", membership.name, model_dir, engine.name, url)
                await membership.until_over(engine.failed(), membership.leaving.wait())
            finally:
                await membership.leave()
    finally:
        await client.close()


@asynccontextmanager
async def first_weights(config: Config, *, index: int, model_dir: Path) -> AsyncIterator[Path]:
    """Yield the folder with the first weights of gserver `index`, which exists until the context ends.

    It is `model_dir`, a folder with the same weights that the engine can load, or a folder in which the adapter that
    the run resumes from is merged into the model.
    """
    lora, begun_from = config.model.lora, config.run.resume_from
    if lora is None or begun_from is None or config.weights.lora == "adapter":
        reads_parts = config.gserver.traits.reads_parts
        with nullcontext(model_dir) if reads_parts else hugging_face_folder(model_dir) as folder:
            yield folder
        return
    config.run_dir.mkdir(parents=True, exist_ok=True)
    prefix = f"merged-{index}-"
    for left in config.run_dir.glob(prefix + "*"):  # as large as the model; left by a gserver here that was killed
        await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=config.run_dir) as folder:
        merged = Path(folder) / "model"
        await asyncio.to_thread(merge_adapter, model_dir, Path(begun_from), lora, into=merged)
        yield merged


def running(
    config: Config,
    *,
    index: int,
    model_dir: Path,
    reach: Reach = LOOPBACK,
    keys: GserverKeys = NO_KEYS,
    secret: Secret | None = None,
) -> AbstractAsyncContextManager[tuple[ServedEngine, str]]:
    """Return the context in which the configured engine serves; it yields the server of requests, and its URL.

    Arguments as in `GserverLaunch`.
    """
    launch = GserverLaunch(config=config, index=index, model_dir=model_dir, reach=reach, keys=keys, secret=secret)
    engine = config.gserver.engine
    serve = load_object(config.gserver.traits.serve, key=f"the start of the engine {engine}")
    return cast(AbstractAsyncContextManager[tuple[ServedEngine, str]], serve(launch))


def _gpu_of_weights(config: Config, index: int) -> str:
    """Return the value of `Register.gpu`."""
    if not config.gserver.traits.opens_memory:
        return ""
    return gpu_identity(resolve_device(config.run.device, index=index))
