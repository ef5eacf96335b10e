"""The start of SGLang: a server of the gserver's own, or one that runs already."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from streamrl.checksum import dtype_name
from streamrl.errors import ConfigError, ModelError
from streamrl.gserver.server.engine import ServedEngine
from streamrl.gserver.server.serving import GserverLaunch
from streamrl.gserver.sglang.joined import joined_server
from streamrl.gserver.sglang.server import sglang_server
from streamrl.models import dense_layers, replays_routing
from streamrl.transport.credentials import read_key


@asynccontextmanager
async def serve(launch: GserverLaunch) -> AsyncIterator[tuple[ServedEngine, str]]:
    """Yield the server of the gserver's requests, and its URL."""
    config, model_dir, index = launch.config, launch.model_dir, launch.index
    if dense := dense_layers(model_dir):
        raise ModelError(
            f"{model_dir}: SGLang serves Qwen3-MoE models as if all layers had experts, and layers {dense} have none; "
            'set gserver.engine = "embedded"'
        )
    # SGLang does not flush while requests stay in place: later requests would continue from keys of old weights. It
    # keeps the keys of each adapter apart.
    prompt_cache = config.weights.pause_mode != "in_place" or config.named_adapters
    lora = config.model.lora if config.named_adapters else None
    adapter = launch.first_adapter if lora is not None else None
    addresses = config.gserver.sglang.addresses
    if addresses:
        if index >= len(addresses):
            raise ConfigError(
                f"gserver.sglang.addresses names {len(addresses)} servers, none for gserver/{index}: add its address"
            )
        async with joined_server(
            addresses[index].rstrip("/"),
            model_dir=model_dir,
            weight_version=launch.version,
            max_context=config.gserver.max_context,
            prompt_cache=prompt_cache,
            load_seconds=config.limits.start_seconds,
            stuck_seconds=config.limits.stuck_seconds,
            update_seconds=config.limits.update_seconds,
            key=read_key(config.gserver.api_key_env, setting="gserver.api_key_env"),
            lora=lora,
            adapter=adapter,
            routed_experts=replays_routing(config, model_dir),
        ) as joined:
            yield joined, joined.url
        return
    encryption = launch.encryption
    async with sglang_server(
        config.gserver,
        config.limits,
        reach=launch.reach,
        encryption=(encryption, config.security) if encryption is not None else None,
        index=index,
        model_dir=model_dir,
        device=str(launch.device),
        dtype=dtype_name(launch.dtype),
        seed=launch.seed,
        weight_version=launch.version,
        prompt_cache=prompt_cache,
        keys=launch.keys,
        lora=lora,
        adapter=adapter,
        routed_experts=replays_routing(config, model_dir),
    ) as server:
        yield server, server.url
