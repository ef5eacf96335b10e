"""`streamrl trainer`: a trainer pool, or the part of one that is on this machine, for a run whose manager is somewhere
already.

Owns model workers, and the master if that is here; their output goes where the launcher's goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamrl import config as configuration
from streamrl.config import Config
from streamrl.launch.children import Children
from streamrl.launch.local import CHECKPOINT_SECONDS, STATUS_SECONDS
from streamrl.launch.processes import (
    COMPONENTS,
    Share,
    checkpoint_command,
    command,
    plan_trainer,
    thread_environment,
    visible_gpus,
)
from streamrl.launch.supervise import until_finished
from streamrl.records.sinks import check_installed
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.secret import await_secret, of_run_at

log = logging.getLogger(__name__)


async def run_trainer(
    config: Config,
    *,
    config_file: Path,
    overrides: Sequence[str],
    manager_url: str,
    share: Share,
    master: bool,
    advertise: str = "",
    model_dir: Path | None = None,
    components: Mapping[str, str] = COMPONENTS,
) -> None:
    """Start the model workers of `share`, and the `master`, and watch them until the run is over.

    Raises `ConfigError` where the package of a sink is missing, and `ProcessDied` when one of the processes died; then
    none is left.
    """
    if master:
        check_installed(config.metrics.sinks)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    (config.run_dir / "config.toml").write_text(configuration.to_toml(config))
    await asyncio.to_thread(await_secret, manager_url, config)
    secret = of_run_at(manager_url, config)
    children = Children(logs=None, secret=secret)
    try:
        if model_dir is None:
            model_dir = Path(
                await children.ask(
                    checkpoint_command(
                        config_file, overrides=overrides, manager_url=manager_url, components=components
                    ),
                    name="checkpoint",
                    environment=thread_environment(config.trainer.threads),
                    timeout=CHECKPOINT_SECONDS,
                )
            )
        client = ControlClient.of(config, manager_url, timeout=STATUS_SECONDS)
        try:
            for process in plan_trainer(config, share=share, master=master, gpus=visible_gpus()):
                words = command(
                    process,
                    config_file=config_file,
                    overrides=overrides,
                    manager_url=manager_url,
                    model_dir=model_dir,
                    advertise=advertise,
                    components=components,
                )
                await children.start(process, words)
            await until_finished(children, client=client)
        finally:
            await client.close()
            await children.stop()
    finally:
        children.close()
