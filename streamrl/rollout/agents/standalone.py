"""`streamrl gateway`: the agents' model server alone, in front of inference servers that others have started.

A client opens an episode, its agent uses the episode's URL, and a score ends it (docs/gateway.md). Episodes are played
by the same `AgentWorkflow` as in a rollout worker; the agent is the client itself. Finished episodes are stored in
`FinishedEpisodes`, from where trainers take them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import zlib
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from streamrl.config import Config
from streamrl.errors import UNDECODABLE, ConfigError, PeerError, StreamRLError
from streamrl.models import ensure_checkpoint, eos_token_ids
from streamrl.rollout.activity import Activity
from streamrl.rollout.agents.finished import EpisodeRecord, FinishedEpisodes, TrajectoryRecord, as_parquet
from streamrl.rollout.agents.gateway import LEASE_SECONDS, as_json
from streamrl.rollout.agents.messages import RequestRefused
from streamrl.rollout.agents.model_renderer import renderer_of
from streamrl.rollout.agents.policy import Endpoint, EpisodeRequest, Lease, Score
from streamrl.rollout.agents.runner import Agents
from streamrl.rollout.agents.workflow import AgentWorkflow, open_agents
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.generation import Generator, GroupRoute, policy_version_of
from streamrl.rollout.process import PATIENCE_REQUESTS
from streamrl.rollout.workflows import Sampler, Session
from streamrl.transport.addresses import Reach, is_loopback
from streamrl.transport.credentials import read_key
from streamrl.transport.generation import GenerationClient
from streamrl.transport.vllm import VllmGenerationClient
from streamrl.types import Prompt
from streamrl.waits import cancel

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Interval at which the servers' policy versions are read."""
MOST_TAKEN = 4096
"""Most episodes in a batch."""


class TakeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /finished`."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_TAKEN)] = 64
    lease_seconds: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    wait_seconds: float = LEASE_SECONDS
    format: Literal["json", "parquet"] = "json"


class CallersAgent(Agents):
    """An agent that runs in the client that has opened its episode."""

    def __init__(self) -> None:
        self.access: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()

    async def run(self, task: dict[str, Any], access: Endpoint, *, begun: Callable[[], None]) -> Score:
        self.access.set_result(access)
        begun()
        return Score()


class EpisodeCapture:
    """The open episodes: the `Leases` of the gateway."""

    def __init__(
        self, config: Config, *, chat: ChatTokenizer, generator: Sampler, servers: Sequence[str], into: FinishedEpisodes
    ) -> None:
        self.workflow: AgentWorkflow | None = None
        """Plays the episodes; set once its server has started."""
        self.failed = 0
        """Episodes that ended without a result."""
        self._config = config
        self._chat = chat
        self._generator = generator
        self._servers = servers
        self._finished = into
        self._activity = Activity(idle="episodes")
        self._numbers = itertools.count()
        self._playing: dict[str, asyncio.Task[None]] = {}
        """By the episode's key."""

    @property
    def open(self) -> int:
        """Number of episodes without a score."""
        return len(self._playing)

    async def lease(self, seconds: float, request: EpisodeRequest) -> Lease | None:
        """Open an episode of the client's own task."""
        agent = CallersAgent()
        playing = asyncio.create_task(self._play(request, agent))
        await asyncio.wait((playing, agent.access), return_when=asyncio.FIRST_COMPLETED)
        access = agent.access.result()
        self._playing[access.api_key] = playing

        def ended(task: asyncio.Task[None]) -> None:
            del self._playing[access.api_key]
            if not task.cancelled():
                task.exception()  # counted and logged already; only a client that waits for it raises it

        playing.add_done_callback(ended)
        return Lease(request.task, access)

    async def stored(self, key: str) -> None:
        """Wait until the scored episode with this key is stored; raises `RequestRefused` if it has failed."""
        playing = self._playing.get(key)
        if playing is None:
            return
        try:
            await asyncio.shield(playing)
        except StreamRLError as error:
            raise RequestRefused(f"the episode is not stored: {error}", status=409) from error

    async def close(self) -> None:
        """End all open episodes."""
        await cancel(*self._playing.values())

    async def _play(self, request: EpisodeRequest, agent: CallersAgent) -> None:
        assert self.workflow is not None
        number, rollout = next(self._numbers), self._config.rollout
        prompt = Prompt(
            seq=number, index=number, epoch=0, messages=[], input_ids=[], answer=None, metadata=request.task
        )
        session = Session(
            prompt=prompt,
            sibling=0,
            generator=self._generator,
            route=self._route(request.group or str(number)),
            rewards=None,
            reward=rollout.reward,
            chat=self._chat,
            sampling=rollout.sampling,
            max_context=self._config.gserver.max_context,
            activity=self._activity,
        )
        try:
            trajectories, score = await self.workflow.played_by(agent).play(prompt, session)
            self._finished.add(
                EpisodeRecord(
                    number=0,
                    id=agent.access.result().id,
                    group=request.group,
                    task=request.task,
                    score=trajectories[0].reward if trajectories[0].score is None else trajectories[0].score,
                    metrics=score.metrics,
                    trajectories=[TrajectoryRecord.of(trajectory) for trajectory in trajectories],
                )
            )
        except StreamRLError as error:
            self.failed += 1
            self._activity.log_reason("an episode is lost", error)
            raise

    def _route(self, group: str) -> GroupRoute:
        """Return the route of a group: its episodes share a server, and thus the prompt in its cache."""
        servers = self._servers

        async def next_one(failed: str) -> str:
            return servers[(servers.index(failed) + 1) % len(servers)]

        return GroupRoute(servers[zlib.crc32(group.encode()) % len(servers)], find_another=next_one)


class ServedVersions:
    """The oldest policy version among the servers."""

    def __init__(self, client: GenerationClient, servers: Sequence[str]) -> None:
        self.oldest = 0
        self._client = client
        self._servers = servers

    async def look(self) -> None:
        """Read the versions. Raises `PeerError` if a server does not reply, and `WireError` for a name that is no
        version."""
        infos = await asyncio.gather(*(self._client.model_info(url) for url in self._servers))
        self.oldest = min(policy_version_of(info.weight_version) for info in infos)

    async def watch(self) -> None:
        """Keep the version current; while a server is silent, it stays."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
            except StreamRLError as error:
                log.warning("the policy version stays %d: %s", self.oldest, error)


def routes_of(finished: FinishedEpisodes, capture: EpisodeCapture) -> list[web.RouteDef]:
    """Return the routes by which trainers take finished episodes."""

    async def take(request: web.Request) -> web.Response:
        try:
            wanted = msgspec.json.decode(await request.read() or b"{}", type=TakeRequest)
        except UNDECODABLE as error:
            raise RequestRefused(f"the body has limit, lease_seconds, wait_seconds and format: {error}") from None
        wait = min(max(wanted.wait_seconds, 0.0), LEASE_SECONDS)
        name, episodes = await finished.take(wanted.limit, lease_seconds=wanted.lease_seconds, wait_seconds=wait)
        if not episodes:
            return web.Response(status=204)
        if wanted.format == "parquet":
            return web.Response(
                body=as_parquet(episodes), content_type="application/vnd.apache.parquet", headers={"X-Batch": name}
            )
        return as_json({"batch": name, "episodes": episodes})

    async def acknowledge(request: web.Request) -> web.Response:
        if not finished.acknowledge(request.match_info["batch"]):
            raise RequestRefused("the lease of this batch has ended: use none of it, and take another", status=410)
        return as_json({})

    async def counts(request: web.Request) -> web.Response:
        return as_json(finished.counts() | {"open": capture.open, "failed": capture.failed})

    return [
        web.post("/finished", take),
        web.post("/finished/{batch}/acknowledge", acknowledge),
        web.get("/finished", counts),
    ]


async def serve(
    config: Config,
    *,
    servers: Sequence[str],
    engine: Literal["sglang", "vllm"] = "sglang",
    folder: Path,
    parquet_every: int,
    reach: Reach,
    port: int,
    key: str,
    on_ready: Callable[[str, str], None],
) -> None:
    """Serve agents with the policy at `servers` until cancelled; store finished episodes in `folder`.

    `engine`: the API of the servers; gservers of streamrl have SGLang's.
    `key`: required to open episodes and to take finished ones; if it is empty and other machines reach this one, a
    random one is made. `on_ready` is called with the URL and the key.
    """
    agent = config.rollout.agent
    if agent.scored_by != "agent" or config.named_adapters:
        raise ConfigError(
            'the gateway alone needs rollout.agent.scored_by = "agent", and weights.lora = "merged" if the policy '
            "has an adapter"
        )
    key = required_key(key, reach)
    remote = msgspec.structs.replace(agent, remote=True, function="", command=[], verifiers="")
    config = msgspec.structs.replace(config, rollout=msgspec.structs.replace(config.rollout, agent=remote))
    model_dir = ensure_checkpoint(config)
    chat = ChatTokenizer.load(model_dir, chat_template=config.model.chat_template)
    async with AsyncExitStack() as at_exit:
        kind = VllmGenerationClient if engine == "vllm" else GenerationClient
        client = kind(
            timeout=config.limits.request_seconds,
            key=read_key(config.gserver.api_key_env, setting="gserver.api_key_env"),
        )
        at_exit.push_async_callback(client.close)
        versions = ServedVersions(client, servers)
        try:
            await versions.look()
        except PeerError as error:
            raise ConfigError(f"--server: {error}; start it first, and give its URL as http://HOST:PORT") from error
        generator = Generator(
            client,
            sampling=config.rollout.sampling,
            seed=secrets.randbits(32),
            patience=PATIENCE_REQUESTS * config.limits.request_seconds,
            tokens_per_request=config.rollout.tokens_per_request,
            decode=chat.decode,
            eos_token_ids=eos_token_ids(model_dir),
            policy_version=lambda: versions.oldest,
        )
        finished = FinishedEpisodes(folder, parquet_every=parquet_every)
        at_exit.callback(finished.close)
        capture = EpisodeCapture(config, chat=chat, generator=generator, servers=servers, into=finished)
        at_exit.push_async_callback(capture.close)
        workflow = await open_agents(
            config,
            CallersAgent(),
            model_dir=model_dir,
            renderer=renderer_of(chat, name=agent.renderer),
            at_exit=at_exit,
            reach=reach,
            port=port,
            leases=capture,
            lease_key=key,
            routes=routes_of(finished, capture),
            stored=capture.stored,
        )
        capture.workflow = workflow
        on_ready(workflow.url, key)
        await versions.watch()


def required_key(key: str, reach: Reach) -> str:
    """Return `key`; if it is empty and other machines can connect, a random one."""
    return key or ("" if is_loopback(reach.local) else secrets.token_urlsafe(24))
