"""A vLLM server that was started outside the run, at a Unix socket of this machine, and joins it as it is.

`streamrl vllm` starts one, with the flags and changes that a gserver would start it with. It loads the first weights of
each run that it joins, and is left running when the run ends.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from streamrl.checksum import dtype_name
from streamrl.config import Config
from streamrl.errors import ConfigError, ModelError, PeerError, PeerLost, WireError
from streamrl.gserver.server.serving import GserverLaunch
from streamrl.gserver.vllm.client import VllmClient
from streamrl.gserver.vllm.command import VllmLaunch, command, environment
from streamrl.models import ensure_checkpoint, max_position, replays_routing
from streamrl.transport.generation import SamplingParams
from streamrl.transport.vllm import TokenReply, TokenRequest, sampling

log = logging.getLogger(__name__)

START = "start it with `streamrl vllm CONFIG SOCKET`"
OWNER_ONLY = 0o077
"""Permissions of group and others, which a socket must not have: vLLM asks nobody at a Unix socket for a key."""
HOT = 2.0
"""The highest temperature that vLLM takes."""


def vllm_launch(launch: GserverLaunch, socket: Path) -> VllmLaunch:
    """Return how a server for `launch` is started, which listens at `socket`."""
    config, model_dir = launch.config, launch.model_dir
    return VllmLaunch(
        model_dir=model_dir,
        socket=socket,
        device=str(launch.device),
        dtype=dtype_name(launch.dtype),
        seed=launch.seed % 2**31,
        max_context=min(config.gserver.max_context, max_position(model_dir)),
        routed_experts=replays_routing(config, model_dir),
        adapter=config.model.lora if config.weights.lora == "adapter" else None,
    )


def become_server(config: Config, socket: Path, *, index: int) -> None:
    """Replace this process by a server for gserver `index`, which listens at `socket`.

    Raises `ConfigError` if there is something at `socket`, `ModelError` if vLLM's interpreter cannot be started.
    """
    if socket.exists():
        raise ConfigError(
            f"{socket} exists: another server may listen there; stop it, remove the file, or name another"
        )
    launch = GserverLaunch(config=config, index=index, model_dir=ensure_checkpoint(config))
    words = command(config.gserver, vllm_launch(launch, socket))
    variables = environment(config.gserver, device=str(launch.device), index=index)
    os.umask(OWNER_ONLY)
    try:
        os.execvpe(words[0], words, {**os.environ, **variables})
    except OSError as error:
        raise ModelError(
            f"vLLM's interpreter {words[0]} cannot be started ({error.strerror}); "
            "set gserver.vllm.python to one that has vllm"
        ) from error


def joined_socket(addresses: Sequence[str], index: int) -> Path:
    """Return the socket of the server that gserver `index` joins.

    Raises `ConfigError` if none is named for it, if there is none, or if other users may open it.
    """
    if index >= len(addresses):
        raise ConfigError(
            f"gserver.vllm.addresses names {len(addresses)} servers, none for gserver/{index}: add its socket"
        )
    socket = Path(addresses[index]).expanduser()
    where = f"gserver.vllm.addresses: {socket}"
    try:
        mode = socket.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; no vLLM server listens there: {START}") from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{where} is not a socket; name the one of a vLLM server: {START}")
    if mode & OWNER_ONLY:
        raise ConfigError(f"{where}: other users may open it (mode {mode & 0o777:o}); run chmod 600 {socket}")
    return socket


async def join(client: VllmClient, socket: Path, *, model_dir: Path, max_context: int) -> None:
    """Have the server serve the model in `model_dir`, in any state that an earlier run left it in.

    Raises `PeerLost` if it does not reply, `ConfigError` if its flags do not fit the run, `ModelError` if it cannot
    load the model.
    """
    try:
        await client.abort([])
        await client.resume()
        room = await client.max_context()
        scores = [await _score(client, temperature) for temperature in (1.0, HOT)]
    except PeerLost as error:
        raise PeerLost(f"no vLLM server replies at {socket} (gserver.vllm.addresses): {error}; {START}") from error
    except (PeerError, WireError) as error:
        raise ConfigError(f"the vLLM server at {socket} does not fit the run: {error}; {START}") from error
    problems = []
    if room < max_context:
        problems.append(f"its longest context, {room} tokens, is less than gserver.max_context = {max_context}")
    if scores[0] == scores[1]:
        problems.append("its log-probabilities are not taken at the sampling temperature and over all tokens")
    if problems:
        raise ConfigError(f"the vLLM server at {socket} does not fit the run: {'; '.join(problems)}; {START}")
    try:
        await client.load(model_dir)
    except PeerError as error:
        raise ModelError(
            f"the vLLM server at {socket} did not load {model_dir}: {error}; it has to serve a model of the same shape"
        ) from error
    await client.forget_prompts()
    log.info("joined the vLLM server at %s; it is left running at the end", socket)


async def _score(client: VllmClient, temperature: float) -> float:
    """Return the log-probability of the most likely token after a token, sampled with the filter `top_k`."""
    replies: list[TokenReply] = []
    params = sampling(SamplingParams(max_new_tokens=1, temperature=temperature, top_k=1, ignore_eos=True), stop=[])
    name = f"streamrl-check-{temperature:g}"
    await client.generate(TokenRequest(request_id=name, token_ids=[0], sampling_params=params), replies.append)
    scores = replies[0].choices[0].logprobs
    if scores is None or not scores.content:
        raise PeerError("it returns no log-probabilities")
    return scores.content[0].logprob
