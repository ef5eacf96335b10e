"""The rehearsal of `streamrl check CONFIG`: test on this machine the parts that a run needs, without starting one.

Uses the same model folder, prompts, workflow and reward processes as the run. Invariant: every failure, also in the
user's own code, becomes one entry of `wrong`, and the other parts are tried all the same.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from streamrl.causal_models import weight_views
from streamrl.config import Config, by_task
from streamrl.config.sections import as_evaluated
from streamrl.config.trainer import RoleName, role_config
from streamrl.disk import cache_home
from streamrl.errors import ConfigError, DataError, RewardError, StreamRLError
from streamrl.hooks import is_hook, load_hook, load_object
from streamrl.launch.doctor import room_in
from streamrl.launch.processes import fitted
from streamrl.lora import adapter_specs
from streamrl.models import check_checkpoint, check_tokens, ensure_checkpoint
from streamrl.processor import avoid_broken_instructions
from streamrl.records import progress
from streamrl.records.sinks import check_installed
from streamrl.rollout.agents.runner import agents_of
from streamrl.rollout.data import PromptSource, answer_text
from streamrl.rollout.process import load_data
from streamrl.rollout.reward.functions import Response
from streamrl.rollout.reward.pool import RewardPool
from streamrl.rollout.workflows import load_workflow
from streamrl.rows import try_sampler
from streamrl.safetensors_files import MODEL, TensorFiles
from streamrl.trainer.algorithms import registry
from streamrl.trainer.backends.base import Head, checked
from streamrl.trainer.backends.optimizer import checked_state, share_of_peak
from streamrl.trainer.backends.torch import on_meta
from streamrl.trainer.graph import graph_of
from streamrl.trainer.layout import layout_of
from streamrl.trainer.worker.assembly import megatron_needed
from streamrl.transport import secret
from streamrl.transport.addresses import everywhere, is_wildcard
from streamrl.transport.credentials import read_key
from streamrl.types import Prompt

PROMPTS = 16
"""Number of prompts that are rendered, from the first on."""
ROWS, ROWS_SECONDS = 100_000, 10.0
"""Most rows that are read, and the time limit for it."""
NAMED_ROWS = 3
"""Most unusable rows that are named; further ones are only counted."""
SCORED_ROWS, SCORING_SECONDS = 8, 30.0
"""Rows, spread over the data set, with which the reward function is tried, and the time after which no further row is
begun."""
MADE_UP = "a made-up response"
"""Response that is scored for a row without an answer."""
SHORT = 60
"""Characters of an answer that are shown."""
SERVER_SECONDS = 60.0
TRACEBACK_LINES = 6


@dataclass
class Rehearsal:
    """Results of the check."""

    tried: list[str] = field(default_factory=list)
    """Parts that work, with details."""
    wrong: list[str] = field(default_factory=list)
    """Reasons why the run would fail, and remedies."""
    warnings: list[str] = field(default_factory=list)
    """Reasons why the run might learn nothing, and remedies."""
    untried: list[str] = field(default_factory=list)
    """Parts that only the run itself can test."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Turn any exception in the block into an entry of `wrong`."""
        try:
            yield
        except StreamRLError as error:
            self.wrong.append(f"{name}: {error}")
        except Exception as error:  # the tolerance point that the module docstring names
            lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
            self.wrong.append("\n".join([f"{name}: {type(error).__name__}: {error}", *lines[-TRACEBACK_LINES:-1]]))


def rehearse(config: Config, *, gpus: Sequence[str]) -> Rehearsal:
    """Try the parts that a run of `config` needs on this machine with these `gpus`; takes some seconds."""
    avoid_broken_instructions()
    found = Rehearsal()
    _try_machine(config, gpus, found)
    roles: frozenset[str] = frozenset()
    with found.part("trainer.graph"):
        graph = graph_of(config)
        roles = graph.roles
        for mfc in graph.mfcs:
            if mfc.function:
                load_object(mfc.function, key=f"the function of {mfc.name}")
        found.tried.append(f"model function calls: {', '.join(mfc.name for mfc in graph.mfcs)}")
    for task, own in by_task(config).items():
        with found.part(f"tasks.{task}.algorithm" if task else "algorithm"):
            registry.check(own.algorithm)
            line = f"algorithm: loss {own.algorithm.loss}, advantage {own.algorithm.advantage}"
            found.tried += [line] if line not in found.tried else []
    for key, hook, args in (
        ("rollout.filter", config.rollout.filter, config.rollout.filter_args),
        ("metrics.hook", config.metrics.hook, config.metrics.hook_args),
    ):
        if is_hook(hook):
            with found.part(key):
                load_hook(hook, key=key, args=args)
                found.tried.append(f"{key}: {hook} was imported")
    with found.part("trainer.optimizer"):
        share_of_peak(config.trainer.optimizer)
    folder: Path | None = None
    with found.part("model"):
        folder = ensure_checkpoint(config)
        _try_weights(config, "actor", folder, found, name="model")
        if config.run.resume_from is not None:
            _try_state(Path(config.run.resume_from).expanduser(), folder, config, found)
    others: tuple[tuple[RoleName, str, str | None], ...] = (
        ("ref", "reference.path", config.reference.path),
        ("critic", "critic.path", config.critic.path),
        ("reward", "reward_model.path", config.reward_model.path),
    )
    for role, setting, path in others:
        if path is not None:
            with found.part(setting):
                check_checkpoint(Path(path).expanduser(), setting=setting)
                if folder is not None:
                    check_tokens(Path(path).expanduser(), folder, setting=setting)
                _try_weights(config, role, Path(path).expanduser(), found, name=setting)
        elif folder is not None and role in roles and role in config.trainer.roles:
            with found.part(f"trainer.roles.{role}"):
                _try_weights(config, role, folder, found, name=f"trainer.roles.{role}")
    for task, own in by_task(config).items():
        name = f"tasks.{task}: " if task else ""
        _try_rollout(own, folder, found, name=name)
        if config.evaluation.enabled:
            _try_rollout(as_evaluated(own), folder, found, name=f"{name}evaluation: ")
    found.untried += [
        "the workflow was loaded and not run: that needs an engine",
        "generation, training, the weights' way to the gservers, and whether all of it fits into memory: "
        "streamrl run CONFIG run.total_train_steps=1 run.name=trial",
    ]
    return found


def _try_weights(config: Config, role: RoleName, folder: Path, found: Rehearsal, *, name: str) -> None:
    """Check that the backend of `role` can train the checkpoint's model in its layout, and that the checkpoint has all
    its weights; none is read."""
    specs = _weights_of(config, role, folder)
    checked(folder, specs, head=_head(role))
    millions = sum(math.prod(shape) for _, shape in specs) / 1e6
    found.tried.append(f"{name}: {folder} has all {len(specs)} weights, {millions:,.1f} million numbers")


def _try_state(checkpoint: Path, model: Path, config: Config, found: Rehearsal) -> None:
    """Check that `checkpoint` has optimizer states that fit the trained weights; `model`: folder of the policy."""
    progress.read(checkpoint)
    for home in sorted(path for path in (checkpoint / progress.STATE).iterdir() if path.is_dir()):
        if home.name == "actor":
            specs = _weights_of(config, "actor", model)
            if config.model.lora is not None:
                specs = adapter_specs(specs, config.model.lora)
        else:
            specs = _weights_of(config, "critic", checkpoint / home.name)
        checked_state(home, specs)
        found.tried.append(f"{home} has the optimizer's state")


def _head(role: RoleName) -> Head:
    return "scalar" if role in ("critic", "reward") else "tokens"


def _weights_of(config: Config, role: RoleName, folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the weights that the backend of `role` expects for the model in `folder`."""
    if role_config(config.trainer, role).backend == "torch":
        model = on_meta(folder, head=_head(role))
        views = weight_views(model, names=set(TensorFiles(folder, MODEL).names()))
        return [(name, view.shape) for name, view in views.items()]
    with megatron_needed():
        from streamrl.trainer.backends.megatron.shape import read_shape
        from streamrl.trainer.backends.megatron.weights import stage_weights, whole_shapes
    shape, layout = read_shape(folder), layout_of(config.trainer, role)
    shape.check(layout)
    head = _head(role)
    stages = [stage_weights(shape, head, stage=stage, layout=layout) for stage in range(layout.pipeline)]
    return list(whole_shapes(stages).items())


def _try_machine(config: Config, gpus: Sequence[str], found: Rehearsal) -> None:
    """Check GPUs, sinks, keys, ports, folders, and the engine's server."""
    with found.part("devices"):
        fitted(config, gpus=gpus)
        if config.run.device == "cuda" and not gpus:
            raise ConfigError('run.device = "cuda", and this machine has no GPU; set it to "auto" or "cpu"')
    with found.part("sinks"):
        check_installed(config.metrics.sinks)
    with found.part("keys"):
        read_key(config.gserver.api_key_env, setting="gserver.api_key_env")
        file = Path(config.security.secret_file).expanduser()
        if not config.security.secret_file or file.exists():  # a controller creates a missing file
            secret.given(config)
    with found.part("ports"):
        _listen(config.run.host, config.run.port)
    folders = {"run.dir": config.run_dir, "STREAMRL_CACHE": cache_home()}
    for setting, folder in folders.items():
        with found.part("folders"):
            try:
                free = room_in(folder.expanduser())
            except OSError as error:
                raise ConfigError(f"{setting}: {folder} cannot be written: {error.strerror}") from error
            found.tried.append(f"{setting}: {folder} can be written ({free / 1e9:.1f} GB free)")
    if config.run_dir.exists():
        found.tried.append(f"{config.run_dir} exists: a new run would take the next free number behind its name")
    if config.gserver.server is not None:
        if config.gserver.joins:
            found.untried.append(f"the servers at gserver.{config.gserver.engine}.addresses were not tried")
        else:
            title = config.gserver.traits.title
            with found.part(title):
                python = config.gserver.server.python or sys.executable
                found.tried.append(_find_server(title, config.gserver.engine, python))


def _listen(host: str, port: int) -> None:
    try:
        at = everywhere(host) if is_wildcard(host) else host  # "*" is no address
        family, kind, protocol, _, address = socket.getaddrinfo(at, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
    except OSError as error:
        where = f"run.port = {port} at {host}" if port else f'run.host = "{host}"'
        raise ConfigError(
            f"{where}: nothing can listen there ({error.strerror or error}); give an address of this machine"
            + (", and a port that is free (0: any)" if port else "")
        ) from error


def _find_server(title: str, engine: str, python: str) -> str:
    """Return the version of the package `engine` in the environment of `python`, in words."""
    program = shutil.which(python)
    if program is None:
        raise ConfigError(f'gserver.{engine}.python = "{python}": there is no such program')
    script = (
        f"import importlib.metadata as m; found = m.packages_distributions()['{engine}'][0]; print(m.version(found))"
    )
    done = subprocess.run([program, "-c", script], capture_output=True, text=True, timeout=SERVER_SECONDS, check=False)
    if done.returncode:
        raise ConfigError(
            f"{program} has no {engine}; set gserver.{engine}.python to the interpreter of an environment that has it"
        )
    return f"{title} {done.stdout.strip()} of {program}"


def _try_rollout(config: Config, folder: Path | None, found: Rehearsal, *, name: str) -> None:
    """Do everything that a rollout worker does before its first request; `name` prefixes the results."""
    agent = config.rollout.agent
    if agent.used:
        with found.part(f"{name}rollout.agent"):
            found.tried.append(f"{name}{asyncio.run(_start_agents(config))}")
    else:
        with found.part(f"{name}rollout.workflow"):
            load_workflow(config.rollout.workflow)
    if config.data.sampler:
        with found.part(f"{name}data.sampler"):
            try_sampler(config.data.sampler, config.data.sampler_args)
            found.tried.append(f"{name}data.sampler: {config.data.sampler} chose rows")
    prompts: PromptSource | None = None
    with found.part(f"{name}data"):
        if folder is None:
            found.untried.append(f"{name}prompts, without the model's tokenizer")
        else:
            (prompts,) = load_data(config, folder)[1].values()
            _render_prompts(config, prompts, found, name=name)
    if prompts is not None:
        _read_rows(prompts, found, name=name)
    if config.reward_model.path is not None:
        found.untried.append(f"{name}the reward model was found and not run")
    elif agent.used and agent.scored_by == "agent":
        found.untried.append(f"{name}no episode of the agent was played")
    elif prompts is None:
        found.untried.append(f"{name}the reward function, without a prompt")
    else:
        with found.part(f"{name}rollout.reward"):
            asyncio.run(_try_reward(config, _spread(prompts), found, name=name))


async def _start_agents(config: Config) -> str:
    """Import the agent's function in a separate process, or find its program; return the result in words."""
    agent = config.rollout.agent
    if agent.remote:
        return "agents come by themselves (rollout.agent.remote)"
    if agent.command:
        program = shutil.which(agent.command[0])
        if program is None:
            raise ConfigError(f"rollout.agent.command: there is no program {agent.command[0]}")
        return f"the agent's program is {program}"
    agents = agents_of(config)
    try:
        await agents.start()
    finally:
        await agents.close()
    if agent.verifiers:
        return f"the taskset {agent.verifiers} can be played by {agent.python or sys.executable}"
    return f"the agent's function {agent.function} was imported"


def _render_prompts(config: Config, prompts: PromptSource, found: Rehearsal, *, name: str) -> None:
    """Render the first prompts; raises `ConfigError` if all of them would be rejected."""
    first = [prompts.prompt(seq) for seq in range(min(PROMPTS, len(prompts)))]
    tokens = [len(prompt.input_ids) for prompt in first]
    most = config.data.max_prompt_tokens
    too_long = sum(count > most for count in tokens)
    if too_long == len(first):
        raise ConfigError(
            f"each of the first {len(first)} prompts is longer than data.max_prompt_tokens = {most} "
            f"({min(tokens)} to {max(tokens)} tokens), so all would be rejected; raise it"
        )
    found.tried.append(
        f"{name}the first {len(first)} of {len(prompts)} prompts have {min(tokens)} to {max(tokens)} tokens"
        + (f"; {too_long} of them more than data.max_prompt_tokens = {most}: they are rejected" if too_long else "")
    )


def _read_rows(prompts: PromptSource, found: Rehearsal, *, name: str) -> None:
    until, most = time.monotonic() + ROWS_SECONDS, min(len(prompts), ROWS)
    unusable, index = 0, 0
    while index < most and time.monotonic() < until:
        rehearsed = Rehearsal()
        with rehearsed.part(f"{name}data"):
            prompts.check(index)
        unusable += len(rehearsed.wrong)
        if unusable <= NAMED_ROWS:
            found.wrong += [line for line in rehearsed.wrong if line not in found.wrong]  # the first prompts are in it
        index += 1
    if unusable > NAMED_ROWS:
        named = f"the first {NAMED_ROWS} of them are named"
        found.wrong.append(f"{name}data: {unusable} of {index} rows cannot be used; {named}")
    found.tried.append(f"{name}rows read: {index} of {len(prompts)}")
    if index < len(prompts):
        found.untried.append(f"{name}the last {len(prompts) - index} rows were not read")


def _spread(prompts: PromptSource) -> list[Prompt]:
    """Return up to `SCORED_ROWS` prompts, spread over the data set; rows without a prompt are left out."""
    found = []
    for seq in sorted({place * len(prompts) // SCORED_ROWS for place in range(SCORED_ROWS)}):
        with suppress(DataError):
            found.append(prompts.prompt(seq))
    return found


class _ScoredRow(NamedTuple):
    """Rewards of one row."""

    row: int
    answer: str
    """The row's own answer as text, or `MADE_UP` if it has none."""
    reward: float
    wrong: str = ""
    """Another row's answer; empty: none was scored."""
    wrong_reward: float = -math.inf

    def __str__(self) -> str:
        return (
            f"row {self.row}: its own answer {self.answer[:SHORT]!r} scores {self.reward:g}, "
            f"the wrong one {self.wrong[:SHORT]!r} scores {self.wrong_reward:g}"
        )


async def _try_reward(config: Config, prompts: Sequence[Prompt], found: Rehearsal, *, name: str) -> None:
    """Score the answer of each of `prompts` as a response to it, and a wrong answer too if the response is the answer.

    Raises `RewardError` if the function cannot be loaded, or fails in some rows.
    """
    answers = [MADE_UP if prompt.answer is None else answer_text(prompt.answer) for prompt in prompts]
    scored: list[_ScoredRow] = []
    failed: list[str] = []
    pool = RewardPool(config)
    await pool.start()
    until = time.monotonic() + SCORING_SECONDS
    try:
        for prompt, answer in zip(prompts, answers, strict=True):
            if time.monotonic() > until:
                found.untried.append(f"{name}rows from {prompt.index} on were not scored within {SCORING_SECONDS:g} s")
                break
            try:
                scores = _ScoredRow(prompt.index, answer, await _score(pool, answer, prompt))
                if prompt.answer is not None and not config.rollout.agent.used:
                    wrong = next((other for other in answers if other != answer), MADE_UP)
                    scores = scores._replace(wrong=wrong, wrong_reward=await _score(pool, wrong, prompt))
                scored.append(scores)
            except RewardError as error:
                text = str(error).splitlines()[-1] if failed else str(error)
                failed.append(f"row {prompt.index}, response {answer[:SHORT]!r}: {text}")
    finally:
        await pool.close()
    _report_rewards(scored, found, name=name)
    if failed:
        rows = len(scored) + len(failed)
        raise RewardError("\n".join([f"{len(failed)} of {rows} rows cannot be scored: {failed[0]}", *failed[1:]]))


async def _score(pool: RewardPool, text: str, prompt: Prompt) -> float:
    return await pool.score(Response(text=text, finish_reason="stop", output_tokens=len(text.split()) or 1), prompt)


def _report_rewards(scored: Sequence[_ScoredRow], found: Rehearsal, *, name: str) -> None:
    if not scored:
        return
    rewards = [scores.reward for scores in scored]
    what = "a made-up response" if all(scores.answer == MADE_UP for scores in scored) else "the row's own answer"
    found.tried.append(f"{name}reward of {what} in {len(scored)} rows: {min(rewards):g} to {max(rewards):g}")
    if alike := [scores for scores in scored if scores.reward <= scores.wrong_reward]:
        found.warnings.append(
            f"{name}rollout.reward: in {len(alike)} of {len(scored)} rows the row's own answer does not score more "
            f"than a wrong one; {alike[0]}. Compare response.text with prompt.answer in the function: both are text "
            'unless data.answer_type = "as_is"; or the function expects more of a response than the bare answer'
        )
