"""The start of the embedded engine."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from streamrl.config import MAX_QUEUED
from streamrl.device import keep_freed_memory
from streamrl.gserver.embedded.engine import EmbeddedEngine
from streamrl.gserver.server.engine import Engine, Text
from streamrl.gserver.server.serving import GserverLaunch, behind_http


def serve(launch: GserverLaunch) -> AbstractAsyncContextManager[tuple[Engine, str]]:
    """Return the context in which the engine and its URL exist."""
    keep_freed_memory()
    config, settings, text = launch.config, launch.config.gserver, Text(launch.model_dir)
    engine = EmbeddedEngine(
        folder=launch.model_dir,
        text=text,
        dtype=launch.dtype,
        device=launch.device,
        threads=settings.threads,
        max_running=settings.max_running,
        max_queued=MAX_QUEUED,
        max_context=settings.max_context,
        seed=launch.seed,
        version=launch.version,
        update_timeout=config.limits.update_seconds,
        stuck_seconds=config.limits.stuck_seconds,
        deterministic=settings.deterministic,
        cuda_graphs=settings.cuda_graphs,
        prefix_cache_bytes=int(settings.prefix_cache_mb * 2**20),
        lora=config.model.lora if config.weights.lora == "adapter" else None,
        adapter=launch.first_adapter,
    )
    return behind_http(engine, launch, text=text)
