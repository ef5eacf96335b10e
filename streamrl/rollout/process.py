"""A rollout worker as a process: it joins the run, and opens all resources for making groups.

`serve_until_over` joins the run, does the work until it or the run ends, and closes everything at exit. Training and
evaluations share a `Workshop`.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from streamrl.config import Config, by_task
from streamrl.errors import ConfigError, DataError
from streamrl.mixture import Mixture
from streamrl.models import eos_token_ids, replays_routing
from streamrl.rollout.activity import Activity
from streamrl.rollout.agents.model_renderer import ModelRenderer, renderer_of
from streamrl.rollout.agents.runner import RemoteAgents, agents_of
from streamrl.rollout.agents.workflow import open_agents
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.data import PromptSource
from streamrl.rollout.generation import Generator, GroupRoute, RequestCount
from streamrl.rollout.groups import GroupMaker
from streamrl.rollout.reward.pool import RewardPool
from streamrl.rollout.workflows import Workflow, load_workflow
from streamrl.transport.addresses import Reach, reach_towards
from streamrl.transport.control import Admission, AskRoute, DataFacts
from streamrl.transport.credentials import read_key
from streamrl.transport.generation import GenerationClient
from streamrl.transport.manager_client import ControlClient
from streamrl.transport.membership import Membership
from streamrl.transport.secret import of_run_at
from streamrl.transport.tls import client_context, server_context

PATIENCE_REQUESTS = 2
"""A response is given up after this many times `limits.request_seconds` without a token."""


class WorkerShutdown(Exception):
    """Ends the task groups of a rollout worker, and the groups in them."""


@dataclass(frozen=True)
class RunConnection:
    """The resources of a process that has joined the run."""

    control: ControlClient
    membership: Membership
    reach: Reach
    """The address by which others reach this process."""
    activity: Activity
    at_exit: AsyncExitStack
    """Holds the resources that the work opens; they are closed when the process leaves. The work's own task does not
    close them, since its cancellation would interrupt the closing."""

    def route(self, admission: Admission, requests: RequestCount | None = None) -> GroupRoute:
        """Return the gserver of an admitted group; the manager names another one when it fails."""

        async def find_another(failed: str) -> str:
            message = AskRoute(self.membership.index, admission.seq, failed, admission.evaluation)
            return (await self.control.route(message)).gserver

        return GroupRoute(admission.gserver, name=admission.name, find_another=find_another, requests=requests)


async def serve_until_over(
    config: Config,
    *,
    index: int,
    manager_url: str,
    advertise: str,
    activity: Activity,
    work: Callable[[RunConnection], Coroutine[Any, Any, None]],
) -> None:
    """Do `work` as rollout worker `index` until it ends, the run is over, or the task is cancelled.

    Joins the run first and leaves it at the end, after closing `RunConnection.at_exit`. An error of the work is raised,
    after it is reported to the manager, which stops the run. The loss of the manager is raised, too. `advertise`: see
    `reach_towards`.
    """
    reach = reach_towards(manager_url, advertise=advertise)
    async with AsyncExitStack() as at_exit:
        control = ControlClient.of(config, manager_url)
        at_exit.push_async_callback(control.close)
        membership = Membership(
            control,
            role="rollout",
            index=index,
            address="",
            config=config,
            stats=activity.stats,
            failure=activity.frequent_failure,
        )
        await membership.join(patience=config.limits.start_seconds)
        at_exit.push_async_callback(membership.leave)
        joined = RunConnection(control=control, membership=membership, reach=reach, activity=activity, at_exit=at_exit)
        await membership.until_over(work(joined))


@dataclass(frozen=True)
class Workshop:
    """Everything for making the groups of one task, in training and in evaluations."""

    config: Config
    """The configuration of a run of this task alone."""
    joined: RunConnection
    model_dir: Path
    chat: ChatTokenizer
    rewards: RewardPool | None
    """None if no reward function scores in training."""
    workflow: Workflow
    client: GenerationClient
    prompts: PromptSource
    """The prompts of training."""

    def group_maker(
        self, config: Config, *, prompts: PromptSource, rewards: RewardPool | None, activity: Activity
    ) -> GroupMaker:
        """Return the maker of groups of `prompts`, sampled and scored according to `config`."""
        membership = self.joined.membership
        generator = Generator(
            self.client,
            sampling=config.rollout.sampling,
            seed=config.run.seed,
            patience=PATIENCE_REQUESTS * config.limits.request_seconds,
            tokens_per_request=config.rollout.tokens_per_request,
            decode=self.chat.decode,
            eos_token_ids=eos_token_ids(self.model_dir),
            policy_version=lambda: membership.policy_version,
            history=lambda: membership.history,
            named_adapters=config.named_adapters,
            return_routed_experts=replays_routing(config, self.model_dir),
        )
        return GroupMaker(
            config,
            worker=membership.name,
            prompts=prompts,
            workflow=self.workflow,
            chat=self.chat,
            generator=generator,
            rewards=rewards,
            activity=activity,
        )


async def open_workshops(config: Config, *, joined: RunConnection, model_dir: Path) -> dict[str, Workshop]:
    """Start the reward processes and agents, and load tokenizer and training data; return a workshop for each task.

    All are closed at exit. Raises `DataError`, `ConfigError`, `ModelError` or `RewardError` if one of them fails.
    """
    joined.membership.waiting_for = "reward processes and tokenizer"
    own = by_task(config)
    async with asyncio.TaskGroup() as starting:
        rewards = {name: starting.create_task(start_rewards(each, joined.at_exit)) for name, each in own.items()}
        loading = starting.create_task(asyncio.to_thread(load_data, config, model_dir))
    chat, prompts = loading.result()
    client = GenerationClient(
        timeout=config.limits.request_seconds,
        key=joined.membership.granted.gserver_key,
        tls=client_context(of_run_at(joined.control.url, config), config.security),
    )
    joined.at_exit.push_async_callback(client.close)
    joined.membership.on_unanswering = client.give_up
    found = {}
    for name, each in own.items():
        if (pool := rewards[name].result()) is not None:
            _count_rewards(pool, joined.activity)
        workflow = await _open_workflow(each, joined=joined, chat=chat, model_dir=model_dir)
        found[name] = Workshop(each, joined, model_dir, chat, pool, workflow, client, prompts[name])
    return found


def _count_rewards(pool: RewardPool, activity: Activity) -> None:
    """Add the calls of `pool` to those of the pools of other tasks in `activity`."""
    seconds, calls = activity.reward_busy_seconds, activity.reward_calls_at_once
    activity.reward_busy_seconds = lambda: seconds() + pool.busy_seconds
    activity.reward_calls_at_once = lambda: max(calls(), pool.calls_at_once)


async def start_rewards(config: Config, at_exit: AsyncExitStack) -> RewardPool | None:
    """Start and return the reward processes, which are closed at exit; None if no reward function scores."""
    if not config.reward_function_scores:
        return None
    rewards = RewardPool(config)
    at_exit.push_async_callback(rewards.close)
    await rewards.start()
    return rewards


async def _open_workflow(config: Config, *, joined: RunConnection, chat: ChatTokenizer, model_dir: Path) -> Workflow:
    """Return the workflow; an agent's processes and their model server are closed at exit."""
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
    workflow = await open_agents(
        config,
        agents,
        model_dir=model_dir,
        renderer=renderer,
        at_exit=joined.at_exit,
        reach=joined.reach if agent.remote else joined.reach.of_this_machine,
        port=agent.port + joined.membership.index if agent.port else 0,  # each worker of one machine needs its own port
        leases=agents if isinstance(agents, RemoteAgents) else None,
        lease_key=read_key(agent.api_key_env, setting="rollout.agent.api_key_env"),
        tls=server_context(None, config.security) if config.security.tls_dir and agent.remote else None,
    )
    retries = joined.activity.agent_retries
    joined.activity.agent_retries = lambda: retries() + workflow.retries_answered
    return workflow


def load_data(config: Config, model_dir: Path) -> tuple[ChatTokenizer, dict[str, PromptSource]]:
    """Return the tokenizer, and the prompts of each task of `config`.

    Raises `ModelError`, `DataError`, or `ConfigError` if tokenizer and settings do not fit each other.
    """
    chat, mixture = ChatTokenizer.load(model_dir, chat_template=config.model.chat_template), Mixture.of(config)
    prompts = {}
    for name, own in by_task(config).items():
        for stop in own.rollout.sampling.stop:  # real SGLang would reply to each request with an unhelpful error
            try:
                chat.encode(stop)
            except DataError as error:
                raise ConfigError(
                    f"rollout.sampling.stop has {stop!r}, which the model has no tokens for: {error}"
                ) from error
        prompts[name] = PromptSource.open(own, chat, position=mixture.position)
    return chat, prompts


def facts_of(prompts: Mapping[str, PromptSource], *, most: Mapping[str, int | None]) -> DataFacts:
    """Return the facts of the prompts of each task; `most`: upper bound of the rows that count. Reads files."""
    rows = {name: min(len(source), most.get(name) or len(source)) for name, source in prompts.items()}
    digests = {name: source.digest() for name, source in prompts.items()}
    if len(prompts) == 1:
        return DataFacts(sum(rows.values()), "".join(digests.values()))
    digest = hashlib.blake2b(msgspec.json.encode([rows, digests]), digest_size=8).hexdigest()
    return DataFacts(sum(rows.values()), digest, list(rows.values()))
