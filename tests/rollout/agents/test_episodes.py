"""Episodes from an agent's first call to its trajectories: agents in processes of their own, a scripted gserver."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from streamrl.config import AgentConfig, Config, RolloutConfig
from streamrl.errors import AgentError
from streamrl.rollout.activity import Activity
from streamrl.rollout.agents.gateway import Gateway
from streamrl.rollout.agents.rendering import TemplateRenderer
from streamrl.rollout.agents.runner import Agents, RemoteAgents, agents_of
from streamrl.rollout.agents.workflow import AgentWorkflow, EpisodeTable
from streamrl.rollout.groups import check_trajectory
from streamrl.rollout.workflows import Session
from streamrl.transport.generation import SamplingParams
from streamrl.types import Prompt, Trajectory
from tests.processes import lives
from tests.rollout.making import configured, engine_and_client, maker_of, route_to
from tests.rollout.sessions import CHAT, PROMPT, parts, session

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOLVE = AgentConfig(function="tests.rollout.agents.user_agents:solve", timeout_seconds=60, memory_mb=2000)
OPENING = "{user\n1+1?}\n{assistant\n"


def task(question: str) -> Prompt:
    return msgspec.structs.replace(PROMPT, messages=[{"role": "user", "content": question}], answer=2)


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def solving() -> AsyncIterator[None]:
    """The process of `SOLVE`'s agents, for all tests: to start one costs more than an episode."""
    _solving.append(agents_for(SOLVE))
    try:
        yield
    finally:
        await _solving.pop().close()


_solving: list[Agents] = []


def agents_for(config: AgentConfig) -> Agents:
    """The agents of `config`, not yet started."""
    return agents_of(Config(rollout=RolloutConfig(agent=config)))


@asynccontextmanager
async def started(config: AgentConfig) -> AsyncIterator[Agents]:
    """The agents of `config`: the shared ones, if they are those of `SOLVE`; else its own, which are closed."""
    process = (config.function, config.environment)
    if _solving and process == (SOLVE.function, SOLVE.environment):
        await _solving[0].start()
        yield _solving[0]
        return
    agents = agents_for(config)
    try:
        await agents.start()
        yield agents
    finally:
        await agents.close()


@asynccontextmanager
async def playing(config: AgentConfig) -> AsyncIterator[AgentWorkflow]:
    episodes = EpisodeTable()
    renderer = TemplateRenderer(CHAT)
    async with started(config) as agents:
        leases = agents if isinstance(agents, RemoteAgents) else None
        gateway = Gateway(episodes, model="policy", leases=leases)
        try:
            url = await gateway.start()
            yield AgentWorkflow(
                config, agents=agents, gateway=gateway, url=url, episodes=episodes, renderer=renderer, model="policy"
            )
        finally:
            await gateway.close()


async def play(config: AgentConfig, question: str, *texts: str, **more: Any) -> list[Trajectory]:
    """Play one episode of `question` in which the policy says `texts`."""
    async with playing(config) as workflow:
        return await play_in(workflow, question, *texts, **more)


async def play_in(workflow: AgentWorkflow, question: str, *texts: str, **more: Any) -> list[Trajectory]:
    async with session(*texts, rewards=None, **more) as (made, _):
        found = await workflow.run(task(question), made)
    for trajectory in found:
        check_trajectory(trajectory)
    return found


async def test_two_turns_are_one_trajectory() -> None:
    (found,) = await play(SOLVE, "twice", "Two<|im_end|>", "Yes<|im_end|>")
    assert parts(found) == [
        (False, OPENING),
        (True, "Two}"),
        (False, "\n{user\nSure?}\n{assistant\n"),
        (True, "Yes}"),
    ]
    assert (found.reward, found.turns, found.finish_reason) == (1.0, 2, "stop")
    assert set(found.policy_versions[found.loss_mask].tolist()) == {0, 1}


async def test_branches_train_each_sampled_token_once() -> None:
    activity = Activity(idle="nothing")
    said = ["Two<|im_end|>", "Yes<|im_end|>", "So<|im_end|>", "Else<|im_end|>"]
    found = await play(SOLVE, "branches", *said, activity=activity)
    trained = [[text for sampled, text in parts(trajectory) if sampled] for trajectory in found]
    assert trained == [["Two}", "Yes}"], ["So}"], ["Else}"]]
    assert "Two}" in "".join(text for _, text in parts(found[1]))
    assert [trajectory.reward for trajectory in found] == [1.0] * 3
    stats = activity.stats()
    assert [stats[f"agent_{name}_total"] for name in ("episodes", "calls", "turns", "trajectories")] == [1, 4, 2, 3]
    assert stats["agent_rewritten_total"] == 0


async def test_what_is_waited_for_is_named() -> None:
    activity = Activity(idle="nothing")
    told: list[str] = []
    activity.on_wait(told.append)
    await play(SOLVE, "once", "Two<|im_end|>", activity=activity)
    at_work = "agents at work, tools included"
    assert told == ["nothing", "agents to take their episodes", at_work, "generation", at_work, "nothing"]
    stats = activity.stats()
    assert (stats["agent_tokens_total"], stats["agent_tokens_trained_total"]) == (4, 4)
    assert "agent_episodes_running" not in stats


async def test_a_rewritten_history_is_a_conversation_of_its_own() -> None:
    activity = Activity(idle="nothing")
    found = await play(SOLVE, "rewrite", "Two<|im_end|>", "Yes<|im_end|>", activity=activity)
    assert [[text for sampled, text in parts(trajectory) if sampled] for trajectory in found] == [["Two}"], ["Yes}"]]
    assert activity.stats()["agent_rewritten_total"] == 1


@pytest.mark.parametrize(
    ("question", "discount", "rewards", "score"),
    [
        ("rewards 0 1", 1.0, [2.25, 1.75], 2.25),
        ("rewards 0 1", 0.5, [0.5 + 0.5 * 1.75, 1.75], 2.25),
        ("rewards", 0.5, [0.5, 1.0], 1.0),
        ("notify_rewards 1", 0.0, [0.0, 1.5], 1.5),
    ],
)
async def test_answers_with_rewards_of_their_own_are_trajectories_of_their_own(
    question: str, discount: float, rewards: list[float], score: float
) -> None:
    activity = Activity(idle="nothing")
    config = msgspec.structs.replace(SOLVE, discount=discount)
    found = await play(config, question, "Two<|im_end|>", "Yes<|im_end|>", activity=activity)
    assert [(one.reward, one.score, one.turns) for one in found] == [(reward, score, 1) for reward in rewards]
    trained = [[text for sampled, text in parts(trajectory) if sampled] for trajectory in found]
    assert trained == [["Two}"], ["Yes}"]]
    stats = activity.stats()
    assert stats["agent_trajectories_total"] == (1 if question.startswith("rewards") else 2)
    assert {name: value for name, value in stats.items() if "metric" in name} == (
        {"agent_metric_total/tools": len(question.split()) - 1, "agent_metric_count/tools": 1}
        if question.startswith("rewards")
        else {
            "agent_metric_total/seen": 2,
            "agent_metric_count/seen": 1,
            "agent_metric_total/own": 3,
            "agent_metric_count/own": 1,
        }
    )


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ("rewards 0 nonsense", "rewards: 'nonsense' names none of the 2 answers of this episode"),
        ("notify_rewards 2", "rewards: '2' names none of the 2 answers"),
        ("notify_rewards chatcmpl-1", "rewards: 'chatcmpl-1' names none of the 2 answers"),
    ],
)
async def test_a_reward_for_an_answer_that_there_is_not_is_refused_by_name(question: str, says: str) -> None:
    with pytest.raises(AgentError, match=says):
        await play(SOLVE, question, "Two<|im_end|>", "Yes<|im_end|>")


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ("nothing", "never asked the policy"),
        ("raise", "LookupError: no such tool"),
        ("broken_name", r"FileNotFoundError: caf\\udce9"),
        ("text", "'good' .str.; a score is a number"),
        ("mapping", "a mapping with 'scores'; known: score, rewards, metrics"),
        ("exit", "the agent's process ended with exit code 7"),
        ("memory", "MemoryError"),
        ("none", r"no score within rollout.agent.timeout_seconds = 0\.5, after [01] answers"),
        ("hang", r"no score within rollout.agent.timeout_seconds = 0\.5, after [01] answers"),
        ("spin", r"no score within rollout.agent.timeout_seconds = 0\.5, after 0 answers"),
        ("long", "leaves no room for an answer"),
    ],
)
async def test_a_bad_episode_fails_by_name_and_the_next_one_runs(question: str, says: str) -> None:
    waiting = question in ("none", "hang", "spin")
    config = msgspec.structs.replace(SOLVE, timeout_seconds=0.5 if waiting else 60, max_calls=3)
    async with playing(config) as workflow:
        async with session(*["Two<|im_end|>"] * 3, rewards=None) as (made, _):
            with pytest.raises(AgentError, match=says):
                await workflow.run(task(question), made)
        workflow.config = SOLVE  # the next one has time to start a process
        async with session("Two<|im_end|>", rewards=None) as (made, _):
            assert [one.reward for one in await workflow.run(task("once"), made)] == [0.5]


async def test_a_policy_that_uses_up_its_answers_or_its_context_is_scored() -> None:
    """Its agent fails of the refusal; that is no failure of infrastructure."""
    found = await play(msgspec.structs.replace(SOLVE, max_calls=3), "flood", *["Two<|im_end|>"] * 3)
    assert [trajectory.reward for trajectory in found] == [0.0] * 3
    activity = Activity(idle="nothing")
    room = len(PROMPT.input_ids) + len(CHAT.encode("Two<|im_end|>")) + 2
    (cut,) = await play(SOLVE, "twice", "Two<|im_end|>", max_context=room, activity=activity)
    assert (cut.reward, parts(cut)) == (0.0, [(False, OPENING), (True, "Two}")])
    assert activity.reward_errors == 0


FAILS_ONCE = """
import openai, pathlib, sys
openai.OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": "1+1?"}])
mark = pathlib.Path(sys.argv[1])
if not mark.exists():
    mark.touch()
    sys.exit(3)
print(0.5)
"""


@pytest.mark.parametrize("failure", ["raise", "exit", "hang", "command"])
async def test_an_episode_whose_agent_fails_is_played_again(failure: str, tmp_path: Path) -> None:
    """Siblings share a process: where it ends, both are played again."""
    config = msgspec.structs.replace(SOLVE, timeout_seconds=5 if failure == "hang" else 60)
    if failure == "command":
        config = AgentConfig(command=[sys.executable, "-c", FAILS_ONCE, str(tmp_path / "mark")])
    activity = Activity(idle="nothing")
    async with playing(config) as workflow, engine_and_client() as (engine, client):
        asking = Asking(workflow, f"once {failure} {tmp_path}/mark")
        maker = maker_of(asking, configured(group_size=2), activity=activity, client=client)
        group = await maker.make(0, route_to(engine.url))
    assert group.rewards.tolist() == [0.5, 0.5]
    assert activity.siblings_retried == (2 if failure == "exit" else 1)
    assert group.episodes.tolist() == [0, 1]


class Asking:
    """Plays episodes of one question, whatever the prompt is."""

    def __init__(self, workflow: AgentWorkflow, question: str) -> None:
        self._workflow = workflow
        self._question = question

    async def run(self, prompt: Prompt, session: Session) -> list[Trajectory]:
        return await self._workflow.run(task(self._question), session)


@pytest.mark.parametrize("question", ["million", "garbage regardless", "big regardless"])
async def test_an_agent_that_misbehaves_is_refused_and_disturbs_nobody(question: str) -> None:
    said = ["Two<|im_end|>"]
    async with (
        playing(SOLVE) as workflow,
        session(*said, rewards=None) as (bad, engine),
        session(*said, rewards=None) as (good, _),
    ):
        found = await asyncio.gather(workflow.run(task(question), bad), workflow.run(task("once"), good))
    assert [[trajectory.reward for trajectory in one] for one in found] == [[1.0], [0.5]]
    (asked,) = [request.sampling_params for request in engine.requests]
    assert isinstance(asked, SamplingParams)
    assert asked.max_new_tokens == 50, "no more than the run allows"


async def test_many_at_the_same_time_in_one_process() -> None:
    async with playing(SOLVE) as workflow, session(*["Two<|im_end|>"] * 20, rewards=None) as (made, _):
        found = await asyncio.gather(*(workflow.run(task("once"), made) for _ in range(20)))
    assert [trajectory.reward for one in found for trajectory in one] == [0.5] * 20


async def test_secrets_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "x")  # before the processes of both start
    withheld, passed = (msgspec.structs.replace(SOLVE, environment=[name]) for name in ("OTHER_API_KEY", "MY_API_KEY"))
    (without,) = await play(withheld, "variable MY_API_KEY", "Two<|im_end|>")
    (given,) = await play(passed, "variable MY_API_KEY", "Two<|im_end|>")
    assert (without.reward, given.reward) == (0.0, 1.0)


async def test_what_an_agent_started_ends_with_it(tmp_path: Path) -> None:
    await assert_ends_with_its_episode(SOLVE, f"spawn {tmp_path}/pid", tmp_path / "pid")


async def assert_ends_with_its_episode(config: AgentConfig, question: str, file: Path) -> None:
    """The process whose id the agent writes into `file`; the episode is cancelled, as at its time limit."""
    async with playing(config) as workflow, session(rewards=None) as (made, _):
        episode = asyncio.create_task(workflow.run(task(question), made))
        pid = await asyncio.to_thread(pid_in, file)
        assert lives(pid)
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)
        assert await asyncio.to_thread(is_gone, pid)


# --- programs ---

PROGRAM = """
import json, os, sys, openai
client = openai.OpenAI()
answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": sys.argv[1]}])
print("thinking")
print(len(answer.choices[0].message.content) + json.loads(os.environ["STREAMRL_TASK"])["answer"])
"""


async def test_a_program_is_an_agent() -> None:
    config = AgentConfig(command=[sys.executable, "-c", PROGRAM, "{question}"])
    (found,) = await play(config, "1+1?", "Two<|im_end|>")
    assert parts(found) == [(False, OPENING), (True, "Two}")]
    assert found.reward == 5.0


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["no-such-program"], "no-such-program ended with exit code 1.*\n.*cannot be started: no-such-program"),
        (["sh", "-c", "echo oh no; exit 3"], "sh ended with exit code 3; its last output:\noh no"),
        (["sh", "-c", "kill -9 $$"], "sh was ended by SIGKILL"),
        (["sleep", "600"], r"no score within rollout.agent.timeout_seconds = 0\.5"),
        (["echo", "not a number"], "no score within"),
        (["echo", '{"score": 1, "reward": 2}'], "the last line that the agent printed is no score: .*reward"),
        (["echo", "nan"], "the last line that the agent printed is no score: nan"),
    ],
)
async def test_a_program_that_fails_says_so(command: list[str], says: str) -> None:
    seconds = 0.5 if says.startswith("no score") else 60
    with pytest.raises(AgentError, match=f"(?s){says}"):
        await play(AgentConfig(command=command, timeout_seconds=seconds), "x")


def pid_in(file: Path) -> int:
    """The process id in a file, once it is there."""
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < deadline, f"nothing was written into {file}"
        time.sleep(0.02)
    return int(file.read_text())


def is_gone(pid: int) -> bool:
    """Whether a process has ended, after some time for that."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


# --- elsewhere ---


async def test_an_agent_elsewhere_leases_episodes() -> None:
    config = AgentConfig(remote=True, timeout_seconds=5)
    async with playing(config) as workflow, session("Two<|im_end|>", rewards=None) as (made, _):
        playing_it = asyncio.create_task(workflow.run(task("1+1?"), made))
        async with aiohttp.ClientSession() as asking:
            async with asking.post(f"{workflow.url}/episodes") as answer:
                lease = await answer.json()
            assert lease["task"]["question"] == "1+1?"
            async with AsyncOpenAI(base_url=lease["base_url"], api_key=lease["api_key"]) as client:
                await client.chat.completions.create(model=lease["model"], messages=lease["task"]["messages"])
            for key, status in (("another", 401), (lease["api_key"], 200)):
                shown = {"Authorization": f"Bearer {key}"}
                async with asking.post(lease["score_url"], json={"score": 0.5}, headers=shown) as answer:
                    assert answer.status == status
            (found,) = await playing_it
            assert found.reward == 0.5
            assert parts(found) == [(False, OPENING), (True, "Two}")]
            shown = {"Authorization": f"Bearer {lease['api_key']}"}
            for again, status in ((0.5, 200), (0.75, 410)):
                async with asking.post(lease["score_url"], json={"score": again}, headers=shown) as answer:
                    assert answer.status == status


async def test_an_episode_that_its_harness_elsewhere_never_scores_is_offered_again() -> None:
    config = AgentConfig(remote=True, timeout_seconds=2)
    activity = Activity(idle="nothing")
    async with playing(config) as workflow, engine_and_client() as (engine, client):
        maker = maker_of(
            workflow, configured(group_size=1, algorithm={"advantage": "reinforce++"}), activity=activity, client=client
        )
        making = asyncio.create_task(maker.make(0, route_to(engine.url)))
        async with aiohttp.ClientSession() as asking:
            lost, lease = [await leased(asking, workflow) for _ in range(2)]
            assert lost["id"] != lease["id"]
            async with AsyncOpenAI(base_url=lease["base_url"], api_key=lease["api_key"]) as harness:
                await harness.chat.completions.create(model=lease["model"], messages=lease["task"]["messages"])
            for told, status in ((lost, 410), (lease, 200)):
                shown = {"Authorization": f"Bearer {told['api_key']}"}
                async with asking.post(told["score_url"], json={"score": 0.5}, headers=shown) as answer:
                    assert answer.status == status
        assert (await making).rewards.tolist() == [0.5]
    assert activity.siblings_retried == 1


async def leased(asking: aiohttp.ClientSession, workflow: AgentWorkflow) -> dict[str, Any]:
    async with asking.post(f"{workflow.url}/episodes") as answer:
        assert answer.status == 200
        return dict(await answer.json())


async def test_who_asks_for_an_episode_shows_the_key_where_there_is_one() -> None:
    gateway = Gateway(EpisodeTable(), model="policy", leases=RemoteAgents(), lease_key="0123456789abcdef")
    url = await gateway.start()
    async with aiohttp.ClientSession() as asking, asking.post(f"{url}/episodes") as answer:
        assert answer.status == 401
        assert "rollout.agent.api_key_env" in await answer.text()
    await gateway.close()
