"""What rollout workers and evaluators have in common as processes: joining a run, and making groups.

`serve_until_over` joins the run, does the work until it or the run ends, and closes what the work has opened;
`open_group_maker` builds what turns sequence numbers into scored groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from streamrl.config import Config
from streamrl.errors import ConfigError, DataError
from streamrl.models import eos_token_ids, replays_routing, vocab_size
from streamrl.rollout.activity import Activity
from streamrl.rollout.agents.gateway import Gateway, Sampling
from streamrl.rollout.agents.model_renderer import ModelRenderer, renderer_of
from streamrl.rollout.agents.runner import RemoteAgents, agents_of
from streamrl.rollout.agents.workflow import AgentWorkflow, EpisodeTable
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.data import PromptSource
from streamrl.rollout.generation import Generator
from streamrl.rollout.groups import GroupMaker
from streamrl.rollout.reward.pool import RewardPool
from streamrl.rollout.workflows import Workflow, load_workflow
from streamrl.transport.addresses import Reach, is_loopback, reach_towards
from streamrl.transport.control import Role
from streamrl.transport.generation import GenerationClient
from streamrl.transport.http import Hosts
from streamrl.transport.keys import read_key
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.membership import Membership
from streamrl.transport.secret import of_run_at
from streamrl.transport.tls import client_context, server_context

PATIENCE_REQUESTS = 2
"""A response is given up when no token has come for this many times `rollout.request_timeout_seconds`."""


@dataclass(frozen=True)
class Joined:
    """What a process has once it has joined the run."""

    control: ControlClient
    membership: Membership
    reach: Reach
    """How others reach this process."""
    activity: Activity
    at_exit: AsyncExitStack
    """What the work opens and what is closed when the process leaves; not by the work's own task, whose cancellation
    would cut the closing short."""


async def serve_until_over(
    config: Config,
    *,
    role: Role,
    index: int,
    manager_url: str,
    advertise: str,
    activity: Activity,
    work: Callable[[Joined], Coroutine[Any, Any, None]],
) -> None:
    """Do `work` as `role`/`index` until it ends, the run is over, or the task is cancelled.

    Joins the run first and leaves it at the end, after closing what the work has opened. An error of the work is told
    to the manager, which stops the run, and raised; so is the loss of the manager. `advertise`: see `reach_towards`.
    """
    reach = reach_towards(manager_url, advertise=advertise)
    async with AsyncExitStack() as at_exit:
        control = ControlClient.of(config, manager_url)
        at_exit.push_async_callback(control.close)
        membership = Membership(
            control,
            role=role,
            index=index,
            address="",
            config=config,
            stats=activity.stats,
            failure=activity.frequent_failure,
        )
        await membership.join(patience=config.manager.join_timeout_seconds)
        at_exit.push_async_callback(membership.leave)
        joined = Joined(control=control, membership=membership, reach=reach, activity=activity, at_exit=at_exit)
        await membership.until_over(work(joined))


async def open_group_maker(config: Config, *, joined: Joined, model_dir: Path) -> tuple[GroupMaker, PromptSource]:
    """Start the reward processes, load data and tokenizer, and return what makes groups; all is closed at exit.

    Raises `DataError`, `ConfigError`, `ModelError` or `RewardError` when one of them cannot be had.
    """
    joined.membership.waiting_for = "reward processes and tokenizer"
    rewards = RewardPool.of(config) if config.reward_function_scores else None
    if rewards is not None:
        joined.at_exit.push_async_callback(rewards.close)
        pool = rewards
        joined.activity.reward_busy_seconds = lambda: pool.busy_seconds
        joined.activity.reward_calls_at_once = lambda: pool.calls_at_once
    async with asyncio.TaskGroup() as starting:
        if rewards is not None:
            starting.create_task(rewards.start())
        loading = starting.create_task(asyncio.to_thread(load_data, config, model_dir))
    chat, prompts = loading.result()
    joined.activity.describe_row = prompts.describe
    workflow = await _open_workflow(config, joined=joined, chat=chat, model_dir=model_dir)
    client = GenerationClient(
        timeout=config.rollout.request_timeout_seconds,
        key=joined.membership.granted.gserver_key,
        tls=client_context(of_run_at(joined.control.url, config), config.security),
    )
    joined.at_exit.push_async_callback(client.close)
    joined.membership.on_unanswering = client.give_up
    generator = Generator(
        client,
        sampling=config.rollout.sampling,
        seed=config.run.seed,
        patience=PATIENCE_REQUESTS * config.rollout.request_timeout_seconds,
        tokens_per_request=config.rollout.tokens_per_request,
        decode=chat.decode,
        eos_token_ids=eos_token_ids(model_dir),
        policy_version=lambda: joined.membership.policy_version,
        named_adapters=config.named_adapters,
        return_routed_experts=replays_routing(config, model_dir),
    )
    maker = GroupMaker(
        config,
        worker=joined.membership.name,
        prompts=prompts,
        workflow=workflow,
        chat=chat,
        generator=generator,
        rewards=rewards,
        activity=joined.activity,
    )
    return maker, prompts


async def _open_workflow(config: Config, *, joined: Joined, chat: ChatTokenizer, model_dir: Path) -> Workflow:
    """Return what makes trajectories; an agent's processes and the server that they ask are closed at exit."""
    agent = config.rollout.agent
    if not agent.used:
        return load_workflow(config.rollout.workflow)
    joined.membership.waiting_for = "the agent's processes"
    renderer = await asyncio.to_thread(renderer_of, chat, name=agent.renderer)
    tokenizer: Path | None = None
    if agent.verifiers:
        tokenizer = Path(joined.at_exit.enter_context(TemporaryDirectory(prefix="streamrl-tokenizer-")))
        await asyncio.to_thread(chat.save, tokenizer)
    kind = renderer.kind if isinstance(renderer, ModelRenderer) else "default"
    agents = agents_of(config, tokenizer=tokenizer, renderer=kind)
    joined.at_exit.push_async_callback(agents.close)
    await agents.start()
    episodes = EpisodeTable()
    model = Path(config.model.path).name
    own = config.rollout.sampling
    sampling = Sampling(own.temperature, own.top_p, own.top_k, own.min_p)
    reach = joined.reach if agent.remote or agent.host else joined.reach.of_this_machine
    listening = reach.listening(agent.host)
    if agent.remote and not is_loopback(listening.at) and not agent.api_key_env:
        raise ConfigError(
            f"agents are served at {listening.at}, which is open to others: rollout.agent needs an api_key_env, or "
            "anyone may take episodes"
        )
    gateway = Gateway(
        episodes,
        model=model,
        sampling=sampling,
        vocab_size=vocab_size(model_dir),
        leases=agents if isinstance(agents, RemoteAgents) else None,
        lease_key=read_key(agent.api_key_env, setting="rollout.agent.api_key_env"),
        listening=listening,
        port=port_for_agents(agent.port, joined.membership.role, joined.membership.index),
        hosts=Hosts([agent.host, listening.announced, *config.security.host_names]),
        tls=server_context(None, config.security) if config.security.certificate and agent.remote else None,
    )
    joined.at_exit.push_async_callback(gateway.close)
    joined.activity.agent_retries = lambda: gateway.retries_answered
    url = await gateway.start()
    return AgentWorkflow(
        agent,
        agents=agents,
        gateway=gateway,
        url=url,
        episodes=episodes,
        renderer=renderer,
        model=model,
    )


def port_for_agents(port: int, role: Role, index: int) -> int:
    """Return at which port a process serves its agents, where `rollout.agent.port` is `port`.

    Rollout workers from there on, however many join; evaluators, which may be on the same machine, before it.
    """
    if not port:
        return 0
    return port + index if role == "rollout" else port - 1 - index


def load_data(config: Config, model_dir: Path) -> tuple[ChatTokenizer, PromptSource]:
    """Return the tokenizer and the prompts that `config` names.

    Raises `ModelError`, `DataError`, or `ConfigError` when the one does not fit the other.
    """
    chat = ChatTokenizer.load(model_dir, chat_template=config.model.chat_template)
    for stop in config.rollout.sampling.stop:  # real SGLang would answer each request with an error that says nothing
        try:
            chat.encode(stop)
        except DataError as error:
            raise ConfigError(f"rollout.sampling.stop has {stop!r}, which the model cannot say: {error}") from error
    return chat, PromptSource.open(config, chat)
