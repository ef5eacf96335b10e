"""The gateway alone, in front of a real embedded server, with OpenAI's client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from openai import AsyncOpenAI

import streamrl
from streamrl import config as configuration
from streamrl.errors import ConfigError
from streamrl.gserver.embedded.engine import EmbeddedEngine
from streamrl.gserver.server.process import running
from streamrl.rollout.agents import standalone
from streamrl.rollout.agents.finished import EpisodeRecord, groups_of
from streamrl.transport.addresses import LOOPBACK, Reach

SETTINGS: dict[str, Any] = {
    "model": {"path": "scratch", "scratch": {"alphabet": "0123456789?", "hidden_size": 32, "layers": 1}},
    "data": {"max_prompt_tokens": 8},
    "rollout": {"sampling": {"max_new_tokens": 5}, "agent": {"timeout_seconds": 20.0}},
    "gserver": {"max_context": 64, "dtype": "float32"},
    "trainer": {"dtype": "float32"},
    "run": {"device": "cpu"},
}
CONFIG = configuration.from_dict(SETTINGS, where="test")
KEY = "k" * 32


class Client:
    """A harness and a trainer, as clients of the gateway."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str = "") -> None:
        self.http = http
        self.url = url
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def post(self, path: str, body: Any = None, *, status: int = 200) -> Any:
        async with self.http.post(self.url + path, json=body, headers=self.headers) as reply:
            assert reply.status == status, await reply.text()
            return await reply.json() if status == 200 else None

    async def counts(self) -> Any:
        async with self.http.get(self.url + "/finished", headers=self.headers) as reply:
            return await reply.json()

    async def play(self, task: dict[str, Any], *, group: str, score: float | None = 1.0) -> dict[str, Any]:
        """Play an episode of two rounds; return its lease."""
        lease: dict[str, Any] = await self.post("/episodes", {"task": task, "group": group})
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        async with AsyncOpenAI(base_url=lease["base_url"], api_key=lease["api_key"]) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(model=lease["model"], messages=messages)
                messages += [reply.choices[0].message, {"role": "user", "content": "?"}]
        if score is not None:
            await self.score(lease, score)
        return lease

    async def score(self, lease: dict[str, Any], score: float, *, status: int = 200) -> None:
        headers = {"Authorization": f"Bearer {lease['api_key']}"}
        async with self.http.post(lease["score_url"], json={"score": score}, headers=headers) as reply:
            assert reply.status == status, await reply.text()

    async def take(self, **body: Any) -> tuple[str, list[EpisodeRecord]]:
        found = await self.post("/finished", {"wait_seconds": 0.0, **body})
        return found["batch"], msgspec.convert(found["episodes"], list[EpisodeRecord])


@asynccontextmanager
async def gateway(
    folder: Path, *servers: str, key: str = "", config: configuration.Config = CONFIG
) -> AsyncIterator[Client]:
    ready: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        standalone.serve(
            config,
            servers=servers,
            folder=folder,
            parquet_every=0,
            reach=LOOPBACK,
            port=0,
            key=key,
            on_ready=lambda url, key: ready.set_result((url, key)),
        )
    )
    try:
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving
        async with aiohttp.ClientSession() as http:
            yield Client(http, *ready.result())
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


@pytest.fixture(scope="module")
def trainer() -> streamrl.TorchTrainer:
    return streamrl.TorchTrainer(CONFIG)


async def test_a_trainer_of_its_own_trains_on_what_agents_did(tmp_path: Path, trainer: streamrl.TorchTrainer) -> None:
    async with (
        running(CONFIG, index=0, model_dir=trainer.folder) as (engine, url),
        gateway(tmp_path / "episodes", url) as client,
    ):
        await asyncio.gather(*(client.play({"question": "12"}, group="a", score=float(n)) for n in range(2)))
        batch, episodes = await client.take()
        assert [(one.group, one.task) for one in episodes] == [("a", {"question": "12"})] * 2
        (group,) = groups_of(episodes)
        assert sorted(group.rewards.tolist()) == [0.0, 1.0]
        assert set(group.packed_policy_versions[group.packed_loss_mask].tolist()) == {0}
        (expected,) = trainer.logprobs([group])
        np.testing.assert_allclose(group.packed_behavior_logprobs, expected, atol=1e-4)
        await client.post(f"/finished/{batch}/acknowledge")
        await client.post(f"/finished/{batch}/acknowledge")
        await client.post("/finished", {"wait_seconds": 0.0}, status=204)

        assert trainer.train_step([group])["tokens_trained"] == group.packed_loss_mask.sum()
        assert isinstance(engine, EmbeddedEngine)
        await engine.load(trainer.save(tmp_path / "model"), "1")
        await client.play({"question": "3"}, group="b")
        _, (later,) = await client.take()
        assert {version for found in later.trajectories for version in found.policy_versions} == {-1, 1}
        assert await client.counts() == {
            "finished": 3,
            "ready": 0,
            "leased": 1,
            "acknowledged": 2,
            "open": 0,
            "failed": 0,
        }


async def test_finished_episodes_outlive_the_gateway_and_open_ones_do_not(tmp_path: Path, trainer: Any) -> None:
    async with running(CONFIG, index=0, model_dir=trainer.folder) as (_, url):
        async with gateway(tmp_path, url) as client:
            await client.play({"question": "1"}, group="")
            lost = await client.play({"question": "2"}, group="", score=None)
            assert (await client.counts())["open"] == 1
        async with gateway(tmp_path, url) as client:
            lost["score_url"] = client.url + lost["score_url"].removeprefix(lost["base_url"].partition("/episodes")[0])
            await client.score(lost, 1.0, status=401)
            async with client.http.post(f"{client.url}/finished", json={"format": "parquet"}) as reply:
                (tmp_path / "taken.parquet").write_bytes(await reply.read())
                await client.post(f"/finished/{reply.headers['X-Batch']}/acknowledge")
            assert (await client.counts())["acknowledged"] == 1
    (row, *_) = pq.read_table(tmp_path / "taken.parquet").to_pylist()
    assert (row["number"], row["reward"], row["task"]) == (0, 1.0, '{"question":"1"}')


async def test_an_episode_without_a_score_fails_at_its_deadline(tmp_path: Path, trainer: Any) -> None:
    hasty = configuration.from_dict(
        {**SETTINGS, "rollout": {**SETTINGS["rollout"], "agent": {"timeout_seconds": 0.5}}}, where="test"
    )
    async with (
        running(CONFIG, index=0, model_dir=trainer.folder) as (_, url),
        gateway(tmp_path, url, config=hasty) as client,
    ):
        lease = await client.post("/episodes", {"task": {}})
        async with asyncio.timeout(20):
            while (await client.counts())["failed"] == 0:  # noqa: ASYNC110 (another process would look, too)
                await asyncio.sleep(0.05)
        await client.score(lease, 1.0, status=410)
        unused = await client.post("/episodes", {"task": {}})
        await client.score(unused, 1.0, status=409)  # the policy was asked for nothing
        assert (await client.counts())["finished"] == 0


async def test_the_key_opens_episodes_and_hands_out_finished_ones(tmp_path: Path, trainer: Any) -> None:
    async with (
        running(CONFIG, index=0, model_dir=trainer.folder) as (_, url),
        gateway(tmp_path, url, key=KEY) as client,
    ):
        async with aiohttp.ClientSession() as http:
            stranger = Client(http, client.url)
            for path in ("/episodes", "/finished", "/finished/any/acknowledge"):
                await stranger.post(path, status=401)
        await client.play({"question": "1"}, group="")
        assert (await client.counts())["finished"] == 1
        await client.post("/finished", {"limit": 0}, status=400)
        await client.post("/finished/any/acknowledge", status=410)


def test_a_key_is_made_where_others_can_connect() -> None:
    assert standalone.required_key("", LOOPBACK) == ""
    assert standalone.required_key(KEY, LOOPBACK) == KEY
    elsewhere = Reach("192.0.2.1", "192.0.2.1")
    assert len(standalone.required_key("", elsewhere)) >= 32
    assert standalone.required_key("", elsewhere) != standalone.required_key("", elsewhere)


async def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--server.*127\.0\.0\.1:1\b"):
        async with gateway(tmp_path, "http://127.0.0.1:1"):
            pass


async def test_the_programs_on_the_page(tmp_path: Path, trainer: streamrl.TorchTrainer) -> None:
    (tmp_path / "config.toml").write_text(configuration.to_toml(CONFIG, only_changed=True))
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text()
    harness, training = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    async with (
        running(CONFIG, index=0, model_dir=trainer.folder) as (_, url),
        gateway(tmp_path / "episodes", url) as client,
    ):
        code = harness.replace("http://localhost:8800", client.url).replace("1+1?", "1") + training.replace(
            "policy_version < 100", "policy_version < 1"
        ).replace("config.toml", str(tmp_path / "config.toml"))
        names: dict[str, Any] = {}
        await asyncio.to_thread(exec, compile(code, "docs/gateway.md", "exec"), names)
        assert names["trainer"].policy_version == 1
        assert (await client.counts())["acknowledged"] == 1
