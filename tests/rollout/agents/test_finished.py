"""Finished episodes on disk: each is in one acknowledged batch, across leases and restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from streamrl.errors import DataError
from streamrl.rollout.agents.finished import (
    ACKNOWLEDGED,
    EPISODES,
    EpisodeRecord,
    FinishedEpisodes,
    TrajectoryRecord,
    groups_of,
)


def record(score: float, *, group: str = "", branches: int = 1) -> EpisodeRecord:
    found = [
        TrajectoryRecord([1, 2, 5 + branch], [False, False, True], [0.0, 0.0, -0.5], [-1, -1, 3], score, "stop")
        for branch in range(branches)
    ]
    return EpisodeRecord(0, f"{score:g}", group, {"question": "1+1?"}, score, {"tools": 2.0}, found)


async def taken(finished: FinishedEpisodes, limit: int = 10, *, lease: float = 60.0) -> tuple[str, list[int]]:
    name, episodes = await finished.take(limit, lease_seconds=lease, wait_seconds=0.0)
    return name, [episode.number for episode in episodes]


async def test_an_episode_is_in_one_batch_at_a_time_and_in_none_after_its_acknowledgement(tmp_path: Path) -> None:
    finished = FinishedEpisodes(tmp_path)
    for score in range(5):
        finished.add(record(score))
    first, numbers = await taken(finished, 2)
    assert numbers == [0, 1]
    late, numbers = await taken(finished, 2, lease=0.0)
    assert numbers == [2, 3]
    assert finished.acknowledge(first)
    assert finished.acknowledge(first)
    assert not finished.acknowledge(late)
    assert not finished.acknowledge("unknown")
    again, numbers = await taken(finished)
    assert numbers == [2, 3, 4]
    assert finished.counts() == {"finished": 5, "ready": 0, "leased": 3, "acknowledged": 2}
    finished.close()

    restarted = FinishedEpisodes(tmp_path)
    assert not restarted.acknowledge(again)
    assert restarted.acknowledge(first)
    restarted.add(record(9.0))
    assert (await taken(restarted))[1] == [2, 3, 4, 5]
    restarted.close()


async def test_a_request_waits_for_an_episode_and_for_the_end_of_a_lease(tmp_path: Path) -> None:
    finished = FinishedEpisodes(tmp_path)
    assert await taken(finished) == ("", [])
    finished.add(record(1.0))
    await taken(finished, lease=0.1)
    _, episodes = await finished.take(1, lease_seconds=60.0, wait_seconds=20.0)
    assert [episode.number for episode in episodes] == [0]
    finished.close()


async def test_a_line_that_a_crash_cut_off_is_removed(tmp_path: Path) -> None:
    finished = FinishedEpisodes(tmp_path)
    finished.add(record(1.0))
    finished.close()
    with (tmp_path / EPISODES).open("ab") as file:
        file.write(b'{"number": 1, "id": "x')
    with (tmp_path / ACKNOWLEDGED).open("ab") as file:
        file.write(b'["name", [0')
    restarted = FinishedEpisodes(tmp_path)
    restarted.add(record(2.0))
    assert (await taken(restarted))[1] == [0, 1]
    restarted.close()
    lines = (tmp_path / EPISODES).read_text().splitlines()
    assert [json.loads(line)["score"] for line in lines] == [1.0, 2.0]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / EPISODES).write_text('{"prompt": "mine"}\n')
    with pytest.raises(DataError, match="another folder"):
        FinishedEpisodes(tmp_path)
    assert (tmp_path / EPISODES).read_text() == '{"prompt": "mine"}\n'


def test_parquet_files_have_a_row_for_each_trajectory(tmp_path: Path) -> None:
    finished = FinishedEpisodes(tmp_path, parquet_every=2)
    for score in (0.0, 1.0, 2.0):
        finished.add(record(score, branches=2))
    assert [file.name for file in tmp_path.glob("*.parquet")] == ["episodes-00000000.parquet"]
    finished.close()
    FinishedEpisodes(tmp_path, parquet_every=2).close()
    whole, rest = (pq.read_table(file).to_pylist() for file in sorted(tmp_path.glob("*.parquet")))
    assert [row["number"] for row in whole] == [0, 0, 1, 1]
    (row, other) = rest
    assert (row["score"], row["input_ids"], other["input_ids"]) == (2.0, [1, 2, 5], [1, 2, 6])
    assert json.loads(row["task"]) == {"question": "1+1?"}


def test_episodes_of_one_name_are_a_group() -> None:
    episodes = [record(0.0, group="a"), record(1.0, group="b"), record(2.0, group="a", branches=2)]
    first, second = groups_of(episodes)
    assert first.episodes.tolist() == [0, 1, 1]
    assert first.rewards.tolist() == [0.0, 2.0, 2.0]
    assert (first.prompt_length, second.rewards.tolist()) == (2, [1.0])
    assert first.packed_policy_versions.tolist() == [-1, -1, 3] * 3
