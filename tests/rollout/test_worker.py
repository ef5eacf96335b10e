"""A whole rollout worker between a manager, an engine and the trainer's end of the stream."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.config import Config, from_dict
from streamrl.errors import DataError, RewardError, StreamRLError
from streamrl.records.lineage import Lineage
from streamrl.rollout.data import PromptSource
from streamrl.rollout.worker import serve
from streamrl.stream_dataset import StreamDataset
from streamrl.transport.codec import Limits
from streamrl.transport.generation import GenerateReply, GenerateRequest
from streamrl.transport.puller import GroupPuller
from streamrl.types import NO_VERSION, SampleMeta
from tests.credentials import keys_of
from tests.groups import held
from tests.processes import assert_no_more_than, below
from tests.rollout.characters import make_chat, save_tokenizer
from tests.rollout.engine import Engine, Script, answer, failure, serving
from tests.rollout.manager import Manager, managing

CHAT = make_chat()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("model"))


def configure(**rollout: Any) -> Config:
    rollout = {"group_size": 3, "max_concurrent_groups": 4, "sibling_retries": 0, **rollout}
    rollout.setdefault("reward", {"function": "tests.rollout.user_code:length_reward"})
    data = {"source": "python", "path": "tests.rollout.user_code:row", "size": 20, **rollout.pop("data", {})}
    return from_dict({"rollout": rollout, "data": data, "trainer": {"data_parallel": 2, "batch_groups": 2}})


class Trainer:
    """Two DP heads that only store."""

    def __init__(self, capacity: int = 100) -> None:
        loop = asyncio.get_running_loop()
        self._stored = asyncio.Condition()
        self._told: list[SampleMeta] = []
        self.datasets = [
            StreamDataset(
                rank=rank,
                capacity_groups=capacity,
                on_stored=lambda meta: asyncio.run_coroutine_threadsafe(self._take(meta), loop),
            )
            for rank in range(2)
        ]
        self.ingresses = [
            GroupPuller(dataset, keys=keys_of("model_worker"), limits=Limits(max_group_bytes=1 << 20))
            for dataset in self.datasets
        ]
        for ingress in self.ingresses:
            ingress.start()

    @property
    def stored(self) -> dict[int, SampleMeta]:
        return {meta.seq: meta for meta in self._told if self.datasets[meta.head].find(meta.seq) is not None}

    async def until(self, groups: int) -> None:
        async with asyncio.timeout(30), self._stored:
            await self._stored.wait_for(lambda: len(self.stored) >= groups)

    async def _take(self, meta: SampleMeta) -> None:
        async with self._stored:
            self._told.append(meta)
            self._stored.notify_all()

    def close(self) -> None:
        for ingress in self.ingresses:
            ingress.close()


class Stage:
    def __init__(self, manager: Manager, engine: Engine, trainer: Trainer, worker: asyncio.Task[None]) -> None:
        self.manager = manager
        self.engine = engine
        self.trainer = trainer
        self.worker = worker

    async def finish(self) -> None:
        """End the run and wait for the worker."""
        await self.manager.end()
        async with asyncio.timeout(30):
            await self.worker


@asynccontextmanager
async def stage(
    script: Script, model_dir: Path, config: Config | None = None, capacity: int = 100
) -> AsyncIterator[Stage]:
    before = below()
    trainer = Trainer(capacity)
    async with (
        serving(script) as engine,
        managing(heads=[ingress.endpoint for ingress in trainer.ingresses], gserver=engine.url) as manager,
    ):
        worker = asyncio.create_task(
            serve(config or configure(), manager_url=manager.url, index=1, model_dir=model_dir), name="the worker"
        )
        try:
            yield Stage(manager, engine, trainer, worker)
        finally:
            worker.cancel()
            await asyncio.wait([worker])
            trainer.close()
    await assert_no_more_than(before)
    assert {task.get_name() for task in asyncio.all_tasks()} <= {asyncio.current_task().get_name()}  # type: ignore[union-attr]


def say(request: GenerateRequest, number: int) -> GenerateReply:
    """A response of one to three tokens."""
    return answer([*CHAT.encode("12"[: number % 3]), 2], version=str(number % 2))


def blocked_until(event: asyncio.Event) -> Callable[[GenerateRequest, int], Awaitable[GenerateReply]]:
    async def script(request: GenerateRequest, number: int) -> GenerateReply:
        await event.wait()
        return say(request, number)

    return script


async def test_groups_flow_to_the_heads(model_dir: Path) -> None:
    async with stage(say, model_dir) as on:
        await on.manager.give(range(30))
        await on.trainer.until(30)
        groups = [on.trainer.datasets[seq % 2].find(seq) for seq in range(30)]
        await on.finish()
        (registered,) = on.manager.registered
        assert (registered.role, registered.index, registered.config_digest) == ("rollout", 1, configure().digest())
    source = PromptSource.open(configure(), CHAT)
    assert len(on.trainer.stored) == 30
    for group in groups:
        assert group is not None
        prompt = source.prompt(group.seq).input_ids
        assert (group.worker, group.size, group.prompt_length) == ("rollout/1", 3, len(prompt))
        assert group.generation_seconds > 0
        for sibling, end in enumerate(np.cumsum(group.seqlens)):
            ids = group.packed_input_ids[end - group.seqlens[sibling] : end]
            mask = group.packed_loss_mask[end - group.seqlens[sibling] : end]
            versions = group.packed_policy_versions[end - group.seqlens[sibling] : end]
            assert ids[: len(prompt)].tolist() == prompt
            assert mask.tolist() == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
            assert group.rewards[sibling] == mask.sum()
            assert (versions[~mask] == NO_VERSION).all()
            assert set(versions[mask].tolist()) <= {0, 1}


async def test_no_more_groups_at_a_time_than_allowed_and_all_its_places_used(model_dir: Path) -> None:
    go = asyncio.Event()
    async with stage(blocked_until(go), model_dir) as on:
        await on.manager.give(range(9))
        await on.manager.until(
            lambda: len(on.engine.requests) >= 12 and on.manager.heartbeats[-1].stats["requests_in_flight"] == 12
        )
        assert len(on.engine.requests) == 12  # 4 groups of 3
        assert on.manager.heartbeats[-1].waiting_for == "generation"
        assert on.manager.heartbeats[-1].stats["groups_running"] == 4
        go.set()
        await on.trainer.until(9)
        await on.manager.until(lambda: on.manager.heartbeats[-1].stats["groups_done_total"] == 9)
        last = on.manager.heartbeats[-1]
        assert last.waiting_for == "room in the ledger"
        assert last.stats["tokens_generated_total"] == sum(meta.sampled_tokens for meta in on.trainer.stored.values())
        assert 1 <= last.stats["reward_mean"] <= 3
        assert on.manager.asked[0] == 4
        assert all(1 <= count <= 4 for count in on.manager.asked)
        await on.finish()


async def test_a_refused_request_rejects_its_group_alone(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = PromptSource.open(configure(), CHAT).prompt(5).input_ids

    def script(request: GenerateRequest, number: int) -> Any:
        return failure(400, "no such token") if request.input_ids == bad else say(request, number)

    with caplog.at_level(logging.WARNING):
        async with stage(script, model_dir) as on:
            await on.manager.give(range(8))
            await on.trainer.until(7)
            await on.manager.until(lambda: 5 in on.manager.rejected)
            await on.finish()
    assert sorted(on.trainer.stored) == [0, 1, 2, 3, 4, 6, 7]
    assert "no such token" in on.manager.rejected[5]
    assert len([record for record in caplog.records if "group 5 is rejected" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("on_failed_sibling", "error", "message"),
    [("reject", StreamRLError, r"\d groups in a row failed.*LookupError"), ("stop", RewardError, "LookupError")],
)
async def test_failures_in_a_row_stop_the_run(
    model_dir: Path, on_failed_sibling: str, error: type[Exception], message: str
) -> None:
    reward = {"function": "tests.rollout.user_code:failing_reward"}
    config = configure(reward=reward, max_failures=4, on_failed_sibling=on_failed_sibling)
    async with stage(say, model_dir, config) as on:
        await on.manager.give(range(20))
        with pytest.raises(error, match=f"(?s){message}"):
            async with asyncio.timeout(30):
                await on.worker
        (told,) = on.manager.errors
        assert "rollout/1" in told
        assert "LookupError" in told
        assert bool(on.manager.rejected) == (on_failed_sibling == "reject")
        assert bool(on.manager.failed) == (on_failed_sibling == "stop")  # by all groups that failed at once
        assert all("LookupError" in message.error for message in on.manager.failed)


async def test_a_failed_sibling_is_made_again_until_its_group_is_too_old(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.rollout.groups.FIRST_PAUSE_SECONDS", 0.01)
    config = configure(reward={"function": "tests.rollout.user_code:failing_reward"}, sibling_retries=1000)
    async with stage(say, model_dir, config) as on:

        def retried() -> float:
            return on.manager.heartbeats[-1].stats["siblings_retried_total"] if on.manager.heartbeats else 0.0

        await on.manager.give([0])
        await on.manager.until(lambda: retried() > 0)
        on.manager.policy_version = config.staleness.max_staleness
        before = retried()
        await on.manager.until(lambda: retried() >= before + 6)  # old, but still young enough
        assert not on.manager.rejected
        on.manager.policy_version += 1
        await on.manager.until(lambda: 0 in on.manager.rejected)
        await on.finish()
    assert "LookupError" in on.manager.rejected[0]


async def test_reward_errors_may_count_as_zero(model_dir: Path) -> None:
    reward = {"function": "tests.rollout.user_code:failing_reward"}
    config = configure(reward=reward, max_failures=1, on_failed_sibling="zero")
    async with stage(say, model_dir, config) as on:
        await on.manager.give(range(3))
        await on.trainer.until(3)
        await on.finish()
    assert all(meta.rewards == [0.0] * 3 for meta in on.trainer.stored.values())


async def test_groups_without_contrast_may_be_dropped(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("streamrl.rollout.worker.FILTER_WARNING_GROUPS", 5)
    source = PromptSource.open(configure(), CHAT)
    dull = [source.prompt(seq).input_ids for seq in range(10)]

    def script(request: GenerateRequest, number: int) -> GenerateReply:
        return answer(CHAT.encode("12"), version="0") if request.input_ids in dull else say(request, number)

    config = configure(filter="contrast", max_failures=1, max_concurrent_groups=1)
    async with stage(script, model_dir, config) as on:
        await on.manager.give(range(14))
        await on.trainer.until(4)
        await on.finish()
    assert sorted(on.manager.rejected) == list(range(10))
    assert set(on.manager.rejected.values()) == {"left out by rollout.filter (rewards: [2.0])"}
    assert sorted(on.trainer.stored) == [10, 11, 12, 13]
    warnings = [record.getMessage() for record in caplog.records if "groups in a row (rewards" in record.getMessage()]
    assert [re.findall(r"left out (\d+)", warning) for warning in warnings] == [["5"], ["10"]]


async def test_data_that_cannot_be_read_stops_the_run_with_the_reason(model_dir: Path) -> None:
    config = configure(data={"source": "jsonl", "path": "nowhere.jsonl"})
    async with stage(say, model_dir, config) as on:
        with pytest.raises(DataError, match=r"nowhere\.jsonl"):
            async with asyncio.timeout(30):
                await on.worker
        (told,) = on.manager.errors
        assert "nowhere.jsonl" in told


async def test_groups_move_to_another_gserver(model_dir: Path) -> None:
    async with (
        serving(say) as second,
        stage(lambda request, number: None if number % 2 else answer([4], finish="abort"), model_dir) as on,
    ):
        on.manager.reroute = lambda message: second.url
        await on.manager.give(range(6))
        await on.trainer.until(6)
        await on.finish()
        assert not on.manager.rejected


async def test_when_the_run_has_gone_back_groups_are_kept_that_its_weights_can_learn_from(model_dir: Path) -> None:
    source = PromptSource.open(configure(), CHAT)
    prompts = {seq: source.prompt(seq).input_ids for seq in range(5)}
    resynced, never = asyncio.Event(), asyncio.Event()

    async def script(request: GenerateRequest, number: int) -> GenerateReply:
        ids = request.input_ids
        seq = next(seq for seq, prompt in prompts.items() if ids[: len(prompt)] == prompt)
        new = ids[len(prompts[seq]) :]
        if seq == 1:  # stored with the trainer, which loses it
            return answer([*CHAT.encode("1"), 2], version="4")
        if seq == 2 and not new:  # has a token of a policy that is abandoned
            return answer(CHAT.encode("1"), version="7", finish="abort")
        if seq in (2, 4):  # 4: has no place in the ledger
            await never.wait()
        await resynced.wait()
        if seq == 3 and not new:  # its gserver is brought from abandoned weights to the present ones
            return answer(CHAT.encode("123"), spans=[("5", 0, 1), ("7", 1, 2), ("5", 2, 3)], finish="stop")
        return answer([2], version="5" if seq == 0 else "6.1")

    async with stage(script, model_dir, configure(max_concurrent_groups=5)) as on:
        await on.manager.give(range(5))
        await on.trainer.until(1)
        await on.manager.until(lambda: on.manager.heartbeats[-1].stats["requests_in_flight"] == 12)
        await on.manager.until(lambda: len(on.engine.requests) == 18)  # group 2 was continued
        for dataset in on.trainer.datasets:
            dataset.discard(held(dataset), forget=True)  # as the heads of the next lineage
        on.manager.refused = {4}
        await on.manager.go_back(Lineage(1, policy_version=5, cause="model_worker/0 died"))
        assert on.manager.kept == [{0, 1, 3, 4}]
        await on.engine.until_cancelled(6)
        resynced.set()
        await on.trainer.until(3)
        await on.finish()
    assert not on.manager.rejected
    versions = {seq: set(meta.version_counts) for seq, meta in on.trainer.stored.items()}
    assert versions == {0: {5}, 1: {4}, 3: {5, 6}}
    asked = {tuple(request.input_ids) for request in on.engine.requests}
    assert (*prompts[3], *CHAT.encode("1")) in asked, "the token before the abandoned one is kept"
    assert len(on.engine.requests) == 18 + 3


async def test_a_group_that_waits_for_a_place_goes_to_the_heads_of_the_next_lineage(model_dir: Path) -> None:
    async with stage(say, model_dir, capacity=1) as on:
        await on.manager.give([0, 2])  # of one head
        await on.trainer.until(1)
        (first,) = on.trainer.stored
        await on.manager.until(lambda: on.manager.heartbeats[-1].stats["groups_pushing"] == 1)
        await on.manager.go_back(Lineage(1, policy_version=5, cause="model_worker/0 died"))
        on.trainer.datasets[0].discard([first], forget=False)
        await on.trainer.until(1)
        await on.finish()
        assert on.trainer.stored.keys() == {2 - first}
    assert not on.manager.rejected


@pytest.mark.parametrize("ending", ["stop", "cancel"])
async def test_the_end_leaves_nothing_behind(model_dir: Path, ending: str) -> None:
    async with stage(blocked_until(asyncio.Event()), model_dir) as on:
        await on.manager.give(range(4))
        await on.manager.until(lambda: len(on.engine.requests) == 12)
        if ending == "stop":
            await on.finish()
        else:
            on.worker.cancel()
            with pytest.raises(asyncio.CancelledError):
                await on.worker
        await on.engine.until_cancelled(12)  # the server sees the connections close
        assert not on.manager.rejected
    # and `stage` checks that no process and no task is left
