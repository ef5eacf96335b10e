"""SGLang behind the entry of a gserver: a server of its own, or one that was started outside the run.

The run's other processes call SGLang's own HTTP API at the registered address, so no token passes through this process;
it only reports SGLang's figures in heartbeats. SGLang also carries out weight updates by itself: it joins the weight
group and writes buckets directly into its weights, so generation pauses for the whole transfer
(`gserver/updates/update.py`).

A server of the gserver's own is a child process (`server/child.py`). One that was started outside loads the run's first
weights and is left running when the run ends. It keeps its end of the run's weight group until it ends itself, which
does no harm: the groups of each run have unique names. Invariant: an address is registered only once the server replies
there.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from streamrl.checksum import dtype_name
from streamrl.config import GserverConfig, LimitsConfig, LoraConfig, SecurityConfig
from streamrl.errors import ConfigError, ModelError, PeerError, PeerLost
from streamrl.gserver.server.child import ChildServer, ServerProcess
from streamrl.gserver.server.engine import ServedEngine
from streamrl.gserver.server.monitor import JoinedServer, monitoring
from streamrl.gserver.server.serving import GserverLaunch
from streamrl.gserver.sglang.command import SGLANG, Launch, command, environment
from streamrl.models import dense_layers, replays_routing
from streamrl.records.lineage import version_of
from streamrl.transport.addresses import LOOPBACK, Reach, url_of
from streamrl.transport.credentials import GserverKeys, read_key
from streamrl.transport.generation import (
    ADAPTER_PREFIX,
    INITIAL_WEIGHT_VERSION,
    AbortRequest,
    GenerationClient,
    LoadedAdapters,
    LoadLoraAdapter,
    ModelCards,
    PauseGeneration,
    UnloadLoraAdapter,
    UpdateWeightsFromDisk,
    adapter_name,
)
from streamrl.transport.secret import Secret
from streamrl.transport.tls import certificate_files, client_context
from streamrl.waits import ANSWER_SECONDS


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


log = logging.getLogger(__name__)

OLDEST_VERSION = (0, 5, 23)
"""The oldest SGLang that may join; earlier ones are untested, and may not report which weights sampled a token."""


class Settings(msgspec.Struct, frozen=True):
    """The server's version and its relevant flags; part of /server_info."""

    version: str = ""
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    context_length: int | None = None
    pp_size: int = 1
    dp_size: int = 1
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    lora_target_modules: list[str] | None = None
    enable_return_routed_experts: bool = False


@asynccontextmanager
async def joined_server(
    url: str,
    *,
    model_dir: Path,
    weight_version: str,
    max_context: int,
    prompt_cache: bool,
    load_seconds: float,
    stuck_seconds: float,
    update_seconds: float,
    key: str = "",
    lora: LoraConfig | None = None,
    adapter: Path | None = None,
    routed_experts: bool = False,
) -> AsyncIterator[JoinedServer]:
    """Have the server at `url` serve `model_dir` as `weight_version`, and watch it.

    `max_context`: least context, in tokens, that it must have room for; `prompt_cache`: whether it may keep prompts for
    later requests; `load_seconds`: longest time to load weights; `stuck_seconds`, `update_seconds`: as in `monitoring`;
    `key`: the key that it requires of callers; `lora`: shape of the adapters that it is to load in addition to the
    model, and `adapter` the first of them; `routed_experts`: whether requests will ask for the experts of each token.

    Raises `PeerLost` if no server replies, `ConfigError` if its flags do not fit the run, `ModelError` if it cannot
    load the model.
    """
    client = GenerationClient(timeout=load_seconds, key=key)
    async with monitoring(SGLANG, url, key=key, stuck_seconds=stuck_seconds, update_seconds=update_seconds) as monitor:
        try:
            if not await monitor.is_there():
                raise PeerLost(f"no SGLang server replies at {url} (gserver.sglang.addresses); start it first")
            await _check_flags(
                client,
                url,
                max_context=max_context,
                prompt_cache=prompt_cache,
                lora=lora,
                routed_experts=routed_experts,
            )
            await load(client, url, model_dir, weight_version)
            if lora is not None:
                await _load_adapter(client, url, adapter, weight_version)
        finally:
            await client.close()
        log.info("joined the SGLang server at %s; it is left running at the end", url)
        async with monitor.polling():
            yield JoinedServer("sglang", monitor, url=url)


async def _check_flags(
    client: GenerationClient,
    url: str,
    *,
    max_context: int,
    prompt_cache: bool,
    lora: LoraConfig | None,
    routed_experts: bool,
) -> None:
    settings = await client.get(url, "/server_info", Settings, timeout=ANSWER_SECONDS)
    problems = []
    if _is_old(settings.version):
        problems.append(
            f"it is SGLang {settings.version or 'of an unknown version'}, and streamrl needs "
            f"{'.'.join(map(str, OLDEST_VERSION))} or newer"
        )
    if not prompt_cache and not settings.disable_radix_cache:
        problems.append(
            'with weights.pause_mode = "in_place" prompts of old weights would stay in its cache: '
            "start it with --disable-radix-cache, or choose retract or abort"
        )
    if not prompt_cache and not settings.disable_overlap_schedule:
        problems.append(
            'with weights.pause_mode = "in_place" the tokens of the step before an update would be named after the new '
            "weights: start it with --disable-overlap-schedule, or choose retract or abort"
        )
    if routed_experts and not settings.enable_return_routed_experts:
        problems.append(
            "it does not return the experts of tokens: start it with --enable-return-routed-experts, or set "
            "trainer.replay_routing = false"
        )
    if settings.context_length is not None and settings.context_length < max_context:
        problems.append(f"--context-length={settings.context_length} is less than gserver.max_context = {max_context}")
    if settings.pp_size > 1 or settings.dp_size > 1:
        problems.append(
            f"--pp-size={settings.pp_size} --dp-size={settings.dp_size}: only tensor parallel ranks have places in a "
            "weight group; start it with --tp-size in place of --pp-size, and several servers in place of --dp-size"
        )
    if lora is not None:
        modules = set(settings.lora_target_modules or ())
        fits = settings.enable_lora and (settings.max_lora_rank or 0) >= lora.rank
        if not fits or not ({"all"} == modules or modules >= set(lora.target_modules)):
            problems.append(
                f"it does not take adapters of [model.lora]: start it with --enable-lora --max-lora-rank={lora.rank} "
                f"--lora-target-modules {' '.join(sorted(lora.target_modules))}"
            )
    if problems:
        raise ConfigError(f"the SGLang server at {url} does not fit the run: {'; '.join(problems)}")


def _is_old(version: str) -> bool:
    """Return whether a version is too old. A build from a repository without its tags (0.0.0) does not count as old."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)
    numbers = tuple(int(part) for part in found.groups()) if found else ()
    return numbers < OLDEST_VERSION and numbers != (0, 0, 0)


async def _load_adapter(client: GenerationClient, url: str, adapter: Path | None, weight_version: str) -> None:
    """Unload the adapters of earlier runs, whose names this run will use again, and load the first adapter.

    Raises `ModelError` if it does not load.
    """
    cards = await client.get(url, "/v1/models", ModelCards)
    for card in cards.data:
        if card.parent is not None and card.id.startswith(ADAPTER_PREFIX):
            await client.post(url, "/unload_lora_adapter", UnloadLoraAdapter(card.id), LoadedAdapters)
    name = None if weight_version == INITIAL_WEIGHT_VERSION else adapter_name(version_of(weight_version))
    if adapter is not None and name is not None:
        try:
            await client.post(url, "/load_lora_adapter", LoadLoraAdapter(name, str(adapter)), LoadedAdapters)
        except PeerError as error:
            raise ModelError(f"the adapter in {adapter} cannot be served: {error}") from error


async def load(client: GenerationClient, url: str, model_dir: Path, weight_version: str) -> None:
    """Have the server serve the model in `model_dir` as `weight_version`, in any state that it is in.

    A run that died may have left it paused, or with abandoned requests; these end. Raises `ModelError` if it does not
    load the model.
    """
    # An abandoned load has ended, since the server replied to /server_info: two loads at once would break its front
    # end. In this pause mode it flushes its cache despite waiting requests, but not while one runs, even if aborted.
    await client.update(url, "/pause_generation", PauseGeneration(mode="retract"))
    try:
        request = UpdateWeightsFromDisk(model_path=str(model_dir), weight_version=weight_version)
        outcome = await client.update(url, "/update_weights_from_disk", request)
    finally:
        await client.update(url, "/abort_request", AbortRequest(abort_all=True))
        await client.update(url, "/continue_generation")
    if not outcome.success:
        raise ModelError(
            f"the SGLang server at {url} did not load {model_dir}: {outcome.message or 'no reason given'}; "
            "it has to see that folder, and to serve a model of the same shape"
        )


@asynccontextmanager
async def sglang_server(
    settings: GserverConfig,
    limits: LimitsConfig,
    *,
    reach: Reach = LOOPBACK,
    index: int,
    model_dir: Path,
    device: str,
    dtype: str,
    seed: int,
    weight_version: str,
    prompt_cache: bool,
    keys: GserverKeys,
    routed_experts: bool = False,
    encryption: tuple[Secret, SecurityConfig] | None = None,
    lora: LoraConfig | None = None,
    adapter: Path | None = None,
) -> AsyncIterator[ChildServer]:
    """Start a server, wait until it replies, and end it when the context ends.

    Arguments as in `Launch`; `reach`: the address at which it listens, and the one announced to others; `index`:
    the gserver's; `keys`: the keys that callers must present; `encryption`: for TLS, the material of its certificate.
    Raises the errors of `until_ready`, and `ModelError` if SGLang cannot be started.
    """
    stack = ExitStack()
    certificate = tls = None
    if encryption is not None:
        certificate, tls = stack.enter_context(certificate_files(*encryption)), client_context(*encryption)
    reserved = stack.enter_context(reserved_port(reach.local))
    launch = Launch(
        certificate=certificate,
        model_dir=model_dir,
        host=reach.local,
        port=reserved.getsockname()[1],
        device=device,
        dtype=dtype,
        seed=seed % 2**31,
        weight_version=weight_version,
        prompt_cache=prompt_cache,
        lora=lora,
        adapter=adapter,
        routed_experts=routed_experts,
    )
    words = command(settings, launch)
    log.info("starting SGLang: %s", " ".join(words))
    variables = environment(
        device=device,
        threads=settings.threads,
        index=index,
        ranks=settings.sglang.tensor_parallel,
        group_seconds=limits.update_seconds,
        keys=keys,
    )
    scheme = "http" if tls is None else "https"
    try:
        process = await ServerProcess.start("SGLang", words, variables)
    except BaseException:
        stack.close()
        raise
    try:
        async with monitoring(
            SGLANG,
            url_of(reach.local, launch.port, scheme=scheme),
            key=keys.generation,
            tls=tls,
            stuck_seconds=limits.stuck_seconds,
            update_seconds=limits.update_seconds,
        ) as monitor:
            server = ChildServer(process, monitor, url=url_of(reach.announced, launch.port, scheme=scheme))
            began = time.monotonic()
            await server.until_ready(timeout=limits.start_seconds)
            log.info("SGLang (pid %d) is ready after %.0f s", process.pid, time.monotonic() - began)
            async with monitor.polling():
                yield server
    finally:
        await asyncio.shield(process.stop())
        stack.close()


def reserved_port(host: str) -> socket.socket:
    """Return a socket bound to a free port of `host`, which the system gives to no process that requests any port.

    A process that requests this port by its number and may reuse addresses, as HTTP servers may, can listen there: the
    socket itself does not listen. (SGLang opens its port only after it has loaded its model and opened many others.)
    """
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError:
        reserved.close()
        raise
    return reserved
