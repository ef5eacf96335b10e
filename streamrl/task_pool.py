"""Agents for a loop of your own: a task pool, and the data sets between agents, generation and training.

The loop enqueues tasks, samples the prompts of agents, generates responses with a model of its own, puts them back, and
trains on the groups that have scores (examples/single_controller.py). Agents run in child processes and use a model
server with the APIs of OpenAI and Anthropic. That server, the record of tokens, log-probabilities and policy versions,
and the rules for failed episodes are those of a run (docs/agents.md).

`BufferDataset` holds prompts that wait for a response. `MultiRoundBufferDataset` holds the rounds of each episode until
it is scored, and then its group until the loop samples it. All of it runs in one event loop and one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from streamrl.config import Config, SamplingConfig
from streamrl.errors import ConfigError, DataError
from streamrl.models import ensure_checkpoint
from streamrl.rollout.activity import Activity
from streamrl.rollout.agents.messages import RequestRefused
from streamrl.rollout.agents.model_renderer import renderer_of
from streamrl.rollout.agents.policy import Score
from streamrl.rollout.agents.runner import agents_of
from streamrl.rollout.agents.workflow import AgentWorkflow, EpisodeTable, open_agents
from streamrl.rollout.chat import ChatTokenizer
from streamrl.rollout.data import PromptSource, Row, Rows
from streamrl.rollout.generation import GroupRoute, OnTokens, sampling_params
from streamrl.rollout.groups import GroupMaker
from streamrl.transport.generation import SamplingParams
from streamrl.types import Generation, TrajectoryGroup
from streamrl.waits import cancel

WORKER = "task pool"
"""`TrajectoryGroup.worker` of the groups."""


class BufferedPrompt(msgspec.Struct, eq=False):
    """A prompt of an agent that waits for a response."""

    episode: str
    """Name of the episode, for `MultiRoundBufferDataset.notify_score`."""
    input_ids: list[int]
    """`[tokens]` the whole conversation so far."""
    params: SamplingParams
    """`rollout.sampling` with the limits and stop strings of the request."""
    response: asyncio.Future[Generation]
    """The response, once `put_batch` has it; cancelled if the agent has given up."""


class BufferDataset:
    """The prompts that wait for a response, oldest first."""

    def __init__(self, sampling: SamplingConfig) -> None:
        self._sampling = sampling
        self._waiting: deque[BufferedPrompt] = deque()
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    async def sample(self, prompts: int, *, seconds: float = 0.1) -> list[BufferedPrompt]:
        """Take up to `prompts` prompts; wait up to `seconds` for so many. The list is empty if none arrived."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while len(self._waiting) < prompts:
                    self._arrived.clear()
                    await self._arrived.wait()
        found = [self._waiting.popleft() for _ in range(min(prompts, len(self._waiting)))]
        return [prompt for prompt in found if not prompt.response.done()]

    async def generate(
        self,
        input_ids: Sequence[int],
        *,
        max_new_tokens: int,
        rid: str,
        route: GroupRoute,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Wait for the loop's response to a prompt: the `Sampler` of the agents' sessions. `route` is ignored."""
        params = sampling_params(
            self._sampling, max_new_tokens=max_new_tokens, stop=stop, stop_token_ids=stop_token_ids
        )
        response: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append(BufferedPrompt(rid.rpartition(".")[0], list(input_ids), params, response))
        self._arrived.set()
        generation = await response
        if on_tokens is not None:
            on_tokens(generation.output_ids)
        return generation


class MultiRoundBufferDataset:
    """The rounds of episodes that are not scored yet, and the groups whose episodes are."""

    def __init__(self, episodes: EpisodeTable) -> None:
        """`episodes`: the running episodes, which record their rounds."""
        self._episodes = episodes
        self._groups: list[TrajectoryGroup] = []
        self._failures: deque[Exception] = deque()

    def __len__(self) -> int:
        """Return the number of complete groups."""
        return len(self._groups)

    def put_batch(self, prompts: Sequence[BufferedPrompt], responses: Sequence[Generation]) -> None:
        """Add the response to each prompt to the rounds of its episode, and send it to the agent.

        Raises `DataError` if there is not one response for each prompt, or one has no token, or not a log-probability
        and a version for each.
        """
        if len(prompts) != len(responses):
            raise DataError(f"{len(responses)} responses for {len(prompts)} prompts: put one for each, in order")
        for number, found in enumerate(responses):
            tokens = len(found.output_ids)
            if not tokens or {len(found.logprobs), len(found.versions)} != {tokens}:
                counts = f"{tokens} tokens, {len(found.logprobs)} log-probabilities and {len(found.versions)} versions"
                raise DataError(f"response {number} has {counts}; give equally many, at least one")
        for prompt, response in zip(prompts, responses, strict=True):
            if not prompt.response.done():
                prompt.response.set_result(response)

    def notify_score(
        self,
        episode: str,
        score: float,
        *,
        rewards: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Score an episode, like `policy.notify_score` in the agent; the last score counts.

        `episode`: as in `BufferedPrompt`; it ends once its agent has returned, too. Raises `DataError` if no such
        episode is running, or `rewards` name an unknown answer.
        """
        found = self._episodes.named(episode)
        if found is None:
            raise DataError(f"no episode {episode!r} is running: it has ended, or there was none")
        try:
            found.score(Score(score, dict(rewards or {}), dict(metrics or {})))
        except RequestRefused as error:
            raise DataError(str(error)) from error

    def sample(self, groups: int) -> list[TrajectoryGroup] | None:
        """Take the oldest `groups` complete groups; None if there are fewer.

        Raises the error of a task that could not be completed, once for each such task.
        """
        if self._failures:
            raise self._failures.popleft()
        if len(self._groups) < groups:
            return None
        found, self._groups = self._groups[:groups], self._groups[groups:]
        return found

    def add(self, group: TrajectoryGroup) -> None:
        """Add a group whose episodes have scores."""
        self._groups.append(group)

    def add_failure(self, error: Exception) -> None:
        """Add the failure of a task, for the next call of `sample`."""
        self._failures.append(error)


class ServerWithTask:
    """Agents in child processes, their model server, and the tasks that they work on."""

    def __init__(self, config: Config, *, chat: ChatTokenizer, workflow: AgentWorkflow, prompts: BufferDataset) -> None:
        self.prompts = prompts
        """The prompts of the agents."""
        self.rounds = MultiRoundBufferDataset(workflow.episodes)
        """The rounds of their episodes."""
        self.activity = Activity(idle="tasks")
        """Counters of the agents' work."""
        self._config = config
        self._chat = chat
        self._workflow = workflow
        self._numbers = itertools.count()
        self._unfinished: set[asyncio.Task[None]] = set()

    @property
    def unfinished(self) -> int:
        """Number of enqueued tasks that have neither a complete group nor a failure."""
        return len(self._unfinished)

    def enqueue_task(self, task: Row) -> int:
        """Start `rollout.group_size` episodes of `task`, a row with the columns that `[data]` names; return the `seq`
        of its group. Raises `DataError` if the row has no prompt."""
        seq = next(self._numbers)
        maker = GroupMaker(
            self._config,
            worker=WORKER,
            prompts=PromptSource(rows=_OneTask(task, seq), chat=self._chat, config=self._config.data, seed=0),
            workflow=self._workflow,
            chat=self._chat,
            generator=self.prompts,
            rewards=None,
            activity=self.activity,
        )
        making = asyncio.create_task(self._make(maker, seq), name=f"task {seq}")
        self._unfinished.add(making)
        making.add_done_callback(self._unfinished.discard)
        return seq

    async def close(self) -> None:
        """End all episodes."""
        await cancel(*self._unfinished)

    async def _make(self, maker: GroupMaker, seq: int) -> None:
        try:
            self.rounds.add(await maker.make(seq, GroupRoute(WORKER, find_another=_the_same)))
        except Exception as error:  # tolerance point: raised again by `sample`
            error.add_note(f"task {seq} has no group")
            self.rounds.add_failure(error)


class _OneTask(Rows):
    """The rows of a `PromptSource` with a single task, of any types."""

    def __init__(self, task: Row, seq: int) -> None:
        super().__init__(f"task {seq}", 1, lambda _: task)

    def __getitem__(self, index: int) -> Row:
        task: Row = self._read(index)
        return task

    def place(self, index: int) -> str:
        return self.name


async def _the_same(failed: str) -> str:
    return failed


@asynccontextmanager
async def create_and_launch_task_pool(config: Config, *, folder: Path | None = None) -> AsyncIterator[ServerWithTask]:
    """Start the agents of `[rollout.agent]` and their model server; yield the pool of their tasks. Both end with the
    block.

    Uses `[rollout]`, `[data]` for the names of columns, and `gserver.max_context`. `folder`: a checkpoint with the
    tokenizer of the loop's model; None: `config.model`. Raises `ConfigError` without an agent that this process can
    start, and `AgentError` if the agent cannot be loaded.
    """
    agent = config.rollout.agent
    if agent.scored_by != "agent" or agent.remote or not agent.used:
        raise ConfigError(
            "a task pool needs rollout.agent.function, command or verifiers, without rollout.agent.remote and with "
            'rollout.agent.scored_by = "agent"; an agent elsewhere uses `streamrl gateway`'
        )
    folder = folder if folder is not None else ensure_checkpoint(config)
    chat = ChatTokenizer.load(folder, chat_template=config.model.chat_template)
    async with AsyncExitStack() as at_exit:
        agents = agents_of(config)
        at_exit.push_async_callback(agents.close)
        await agents.start()
        renderer = renderer_of(chat, name=agent.renderer)
        workflow = await open_agents(config, agents, model_dir=folder, renderer=renderer, at_exit=at_exit)
        pool = ServerWithTask(config, chat=chat, workflow=workflow, prompts=BufferDataset(config.rollout.sampling))
        at_exit.push_async_callback(pool.close)
        yield pool
