"""An SGLang server that was started outside the run, and joins it as it is.

It loads the run's first weights and is left running when the run ends. SGLang keeps its end of the run's weight group
until it ends itself, which does no harm: the groups of each run have unique names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from streamrl.config import LoraConfig
from streamrl.errors import ConfigError, ModelError, PeerError, PeerLost
from streamrl.gserver.server.monitor import JoinedServer, monitoring
from streamrl.gserver.sglang.command import SGLANG
from streamrl.records.lineage import version_of
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
from streamrl.waits import ANSWER_SECONDS

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
