"""One gserver process: engine, HTTP server, membership in the run."""

from __future__ import annotations

import asyncio
import logging
import shutil
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

from aiohttp import web

from streamrl.checksum import dtype_name
from streamrl.config import MAX_QUEUED, Config
from streamrl.cuda_memory import gpu_identity
from streamrl.device import keep_freed_memory, resolve_device, resolve_dtype
from streamrl.errors import ConfigError, ModelError
from streamrl.export import hugging_face_folder, merge_adapter
from streamrl.gserver.embedded.engine import EmbeddedEngine
from streamrl.gserver.server.engine import Engine, ServedEngine, Text
from streamrl.gserver.server.http import Server
from streamrl.gserver.sglang.joined import joined_server
from streamrl.gserver.sglang.server import sglang_server
from streamrl.gserver.simulated import SimulatedEngine
from streamrl.gserver.vllm.engine import VllmEngine
from streamrl.limits import CLOSE_SECONDS
from streamrl.models import dense_layers, replays_routing, weights_fingerprint
from streamrl.records import progress
from streamrl.records.lineage import label_of
from streamrl.transport.addresses import LOOPBACK, Listening, reach_towards, url_of
from streamrl.transport.generation import INITIAL_WEIGHT_VERSION
from streamrl.transport.http import Hosts
from streamrl.transport.keys import GserverKeys, read_key
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.membership import Membership
from streamrl.transport.secret import Secret, encrypts, of_run_at
from streamrl.transport.tls import server_context

log = logging.getLogger(__name__)

NO_KEYS = GserverKeys()


async def serve(config: Config, *, manager_url: str, index: int = 0, model_dir: Path, advertise: str = "") -> None:
    """Serve `model_dir` until the run is over.

    `advertise`: the address by which others reach this process; if empty, the one from which it reaches the manager.
    """
    reach = reach_towards(manager_url, advertise=advertise)
    listening = reach.listening
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
            running(config, index=index, model_dir=first, listening=listening, keys=keys, secret=secret) as served,
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

    It is `model_dir`, a folder with the same weights that SGLang can load, or a folder in which the adapter that the
    run resumes from is merged into the model.
    """
    lora, begun_from = config.model.lora, config.run.resume_from
    if lora is None or begun_from is None or config.weights.lora == "adapter":
        with (
            hugging_face_folder(model_dir)
            if config.gserver.engine in ("sglang", "vllm")
            else nullcontext(model_dir) as folder
        ):
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


@asynccontextmanager
async def running(
    config: Config,
    *,
    index: int,
    model_dir: Path,
    listening: Listening = LOOPBACK,
    keys: GserverKeys = NO_KEYS,
    secret: Secret | None = None,
) -> AsyncIterator[tuple[ServedEngine, str]]:
    """Yield the server of this gserver's requests, and its URL.

    `keys`: the keys that it requires of callers; `secret`: the run's secret, for a TLS certificate.
    """
    # SGLang does not flush while requests stay in place: later requests would continue from keys of old weights. It
    # keeps the keys of each adapter apart.
    prompt_cache = config.weights.pause_mode != "in_place" or config.named_adapters
    lora = config.model.lora if config.named_adapters else None
    adapter = _first_adapter(config) if lora is not None else None
    addresses = config.gserver.sglang.addresses
    if config.gserver.engine == "sglang" and (dense := dense_layers(model_dir)):
        raise ModelError(
            f"{model_dir}: SGLang serves Qwen3-MoE models as if all layers had experts, and layers {dense} have none; "
            'set gserver.engine = "embedded"'
        )
    if config.gserver.engine == "sglang" and addresses:
        if index >= len(addresses):
            raise ConfigError(
                f"gserver.sglang.addresses names {len(addresses)} servers, none for gserver/{index}: add its address"
            )
        async with joined_server(
            addresses[index].rstrip("/"),
            model_dir=model_dir,
            weight_version=_initial_version(config),
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
    elif config.gserver.engine == "sglang":
        device = resolve_device(config.run.device, index=index, each=config.gserver.sglang.tensor_parallel)
        encrypted = secret is not None and encrypts(config, listening.at)
        async with sglang_server(
            config.gserver,
            config.limits,
            listening=listening,
            encryption=(secret, config.security) if secret is not None and encrypted else None,
            index=index,
            model_dir=model_dir,
            device=str(device),
            dtype=dtype_name(resolve_dtype(config.gserver.dtype, device)),
            seed=_seed(config, index),
            weight_version=_initial_version(config),
            prompt_cache=prompt_cache,
            keys=keys,
            lora=lora,
            adapter=adapter,
            routed_experts=replays_routing(config, model_dir),
        ) as server:
            yield server, server.url
    else:
        tls = server_context(secret, config.security) if secret and encrypts(config, listening.at) else None
        async with _embedded(
            config, index=index, model_dir=model_dir, listening=listening, keys=keys, tls=tls
        ) as served:
            yield served


@asynccontextmanager
async def _embedded(
    config: Config, *, index: int, model_dir: Path, listening: Listening, keys: GserverKeys, tls: ssl.SSLContext | None
) -> AsyncIterator[tuple[Engine, str]]:
    """Yield an engine in this process behind its HTTP server, and the server's URL."""
    text = Text(model_dir)
    engine = make_engine(config, index=index, model_dir=model_dir, text=text)
    server = Server(engine, text=text)
    await engine.start()
    try:
        runner = web.AppRunner(
            server.application(keys=keys, hosts=Hosts([listening.announced, *config.security.host_names])),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=CLOSE_SECONDS,
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, listening.at, 0, ssl_context=tls)
            await site.start()
            scheme = "http" if tls is None else "https"
            yield engine, url_of(listening.announced, runner.addresses[0][1], scheme=scheme)
        finally:
            await asyncio.shield(runner.cleanup())
    finally:
        await engine.close()


def make_engine(config: Config, *, index: int, model_dir: Path, text: Text) -> Engine:
    """Return the configured in-process engine, not started."""
    settings = config.gserver
    seed = _seed(config, index)
    version = _initial_version(config)
    if settings.engine == "simulated":
        return SimulatedEngine(
            settings.simulation,
            model_path=str(model_dir),
            max_running=settings.max_running,
            max_queued=MAX_QUEUED,
            max_context=settings.max_context,
            seed=seed,
            version=version,
            update_timeout=config.limits.update_seconds,
        )
    if settings.engine == "vllm":
        device = resolve_device(config.run.device, index=index, each=settings.vllm.tensor_parallel)
        return VllmEngine(
            settings,
            config.limits,
            folder=model_dir,
            index=index,
            device=device,
            dtype=resolve_dtype(settings.dtype, device),
            seed=seed,
            version=version,
            routed_experts=replays_routing(config, model_dir),
        )
    keep_freed_memory()
    device = resolve_device(config.run.device, index=index)
    return EmbeddedEngine(
        folder=model_dir,
        text=text,
        dtype=resolve_dtype(settings.dtype, device),
        device=device,
        threads=settings.threads,
        max_running=settings.max_running,
        max_queued=MAX_QUEUED,
        max_context=settings.max_context,
        seed=seed,
        version=version,
        update_timeout=config.limits.update_seconds,
        stuck_seconds=config.limits.stuck_seconds,
        deterministic=settings.deterministic,
        prefix_cache_bytes=int(settings.prefix_cache_mb * 2**20),
        rounds=settings.simulated_int8,
        lora=config.model.lora if config.weights.lora == "adapter" else None,
        adapter=_first_adapter(config),
    )


def _gpu_of_weights(config: Config, index: int) -> str:
    """Return the value of `Register.gpu`. SGLang's ranks do not open memory of other processes."""
    if config.gserver.engine != "embedded":
        return ""
    return gpu_identity(resolve_device(config.run.device, index=index))


def _first_adapter(config: Config) -> Path | None:
    """Return the adapter that a run with [model.lora] resumes from; None if it begins without one."""
    return Path(config.run.resume_from).expanduser().absolute() if config.run.resume_from else None


def _seed(config: Config, index: int) -> int:
    return config.run.seed * 2**20 + index


def _initial_version(config: Config) -> str:
    """Return the name of the weights with which a gserver of the run starts."""
    begun = config.run.resume_from  # the position in the data does not matter here: [data] is not compared
    if begun is None:
        return INITIAL_WEIGHT_VERSION
    reached = progress.read(Path(begun))
    return label_of(reached.policy_version, reached.lineage)
