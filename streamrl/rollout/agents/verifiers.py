"""Tasks of a taskset of the `verifiers` package, listed and played unchanged.

Runs in the interpreter that has the package (`rollout.agent.python`): `play` is the function of the agent's processes,
`serve_listing` lists tasks. Invariant: task `index` of a taskset with the same settings is the same in every process.

An episode's environment sends token requests to the policy and uses its own renderer. The gateway turns these calls,
branches included, into trajectories.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.rollout.agents.policy import Policy
from streamrl.userland import UserFunction

if TYPE_CHECKING:
    import verifiers.v1 as vf

Settings = dict[str, Any]


class _Stage:
    """A serving environment, and the tasks that have been read so far."""

    def __init__(self, env: vf.Env) -> None:
        self.env = env
        self._coming = iter(env.taskset)
        self._tasks: list[Any] = []

    def task(self, index: int) -> Any:
        """Return task `index`; raises `LookupError` if the taskset has fewer tasks."""
        self._tasks += itertools.islice(self._coming, max(0, index + 1 - len(self._tasks)))
        if index >= len(self._tasks):
            raise LookupError(f"the taskset has {len(self._tasks)} tasks here, and task {index} is asked for")
        return self._tasks[index]

    async def forget(self, client: Any) -> None:
        """Close the environment's resources for `client`: it keeps some per client, and each episode has a client."""
        interception: Any = self.env._interception
        for server in getattr(interception, "servers", [interception]):
            opened = server.clients.pop(client.model_dump_json(), None)
            if opened is not None:
                await opened.close()


_stages: dict[str, asyncio.Task[_Stage]] = {}
_serving: set[asyncio.Task[None]] = set()


async def play(
    task: dict[str, Any], policy: Policy, *, tokenizer: str, renderer: Settings, environment: Settings
) -> dict[str, Any]:
    """Play one task of a taskset, and return the environment's score and metrics of the episode.

    `tokenizer`: folder of the policy's tokenizer. `renderer`: the config of a renderer of `renderers`. `environment`:
    the environment's config without the taskset; its `sampling` is for the policy. Raises `RuntimeError` if the
    environment could not play the task.
    """
    import verifiers.v1 as vf

    own = {name: value for name, value in environment.items() if name != "sampling"}
    name = json.dumps([task["taskset"], task["args"], own], sort_keys=True)
    if name not in _stages:
        _stages[name] = asyncio.create_task(_open(task["taskset"], task["args"], own))
    stage = await asyncio.shield(_stages[name])
    client = vf.TrainClientConfig(
        base_url=policy.base_url,
        api_key_var="STREAMRL_NO_SUCH_KEY",
        headers={"x-api-key": policy.api_key},
        renderer_model_name=tokenizer,
        renderer=renderer,
    )
    sampling = vf.SamplingConfig.model_validate(environment.get("sampling", {}))
    context = vf.ModelContext(model=policy.model, client=client, sampling=sampling)
    try:
        (slot,) = stage.env.slots(stage.task(task["index"]))
        episode = await stage.env.run_slot(slot, context)
    finally:
        await stage.forget(client)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors:
        raise RuntimeError(f"verifiers: {errors[-1].type}: {errors[-1].message}")
    if not episode.traces:
        raise RuntimeError("verifiers: the episode has no trace")
    if untrained := [trace.agent.name for trace in episode.traces if not trace.agent.trainable]:
        raise RuntimeError(
            f"verifiers: {', '.join(untrained)} of the environment is not to be trained, but may have asked the policy"
        )
    return {"score": fmean(trace.reward for trace in episode.traces), "metrics": dict(_metrics(episode.traces))}


async def _open(taskset: str, args: Settings, environment: Settings) -> _Stage:
    ready: asyncio.Future[_Stage] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(_serve(taskset, args, environment, ready), name=f"taskset {taskset}")
    _serving.add(serving)
    serving.add_done_callback(_serving.discard)
    return await ready


async def _serve(taskset: str, args: Settings, environment: Settings, ready: asyncio.Future[_Stage]) -> None:
    """Keep the environment open until the process ends, within one task, as its resources may require."""
    try:
        env = _environment(taskset, args, environment)
        async with env.serving():
            ready.set_result(_Stage(env))
            await asyncio.get_running_loop().create_future()
    except Exception as error:  # the user's taskset may raise anything; every episode reports it
        if ready.done():
            raise  # no episode reports it: asyncio logs it
        ready.set_exception(error)


def _environment(taskset: str, args: Settings, environment: Settings) -> vf.Env:
    """Return the environment of `taskset`; its agents run on this machine unless `environment` sets another runtime."""
    import verifiers.v1 as vf

    settings: Settings = {"interception": {"type": "server"}, **environment, "taskset": {**args, "id": taskset}}
    kind = vf.env_config_type(taskset, settings.get("id", ""))
    for name, field in kind.model_fields.items():
        if isinstance(field.default, vf.AgentConfig):
            settings[name] = {"runtime": {"type": "subprocess"}, **settings.get(name, {})}
    return vf.load_environment(vf.resolve_env_config(settings))


def _metrics(traces: list[Any]) -> Iterator[tuple[str, float]]:
    """Yield rewards and metrics by name; each is the mean over the agents."""
    found: dict[str, list[float]] = {}
    for trace in traces:
        rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        for name, value in [*rewards.items(), *trace.metrics.items()]:
            if value is not None:
                found.setdefault(name, []).append(value)
    for name, values in found.items():
        yield name, fmean(values)


def serve_listing(*, taskset: str, args: Settings, environment: Settings) -> UserFunction:
    """Return a function that lists the first `size` tasks as rows (`userland.Setup.loader`)."""
    env = _environment(taskset, args, environment)

    def rows(size: int) -> list[Settings]:
        return [
            {"prompt": _prompt(task, index), "taskset": taskset, "args": args, "index": index}
            for index, task in enumerate(itertools.islice(env.taskset, size))
        ]

    return UserFunction(rows, arguments=msgspec.msgpack.Decoder(tuple[int]).decode, result=list)


def _prompt(task: Any, index: int) -> Any:
    """Return the prompt of `task` for its row; the environment builds its own prompt from the task."""
    prompt = task.data.prompt
    if isinstance(prompt, str):
        return prompt or f"task {index}"
    if not prompt:
        return task.data.name or f"task {index}"
    from verifiers.v1.types import content_text

    return [{"role": message.role, "content": content_text(message.content)} for message in prompt]
