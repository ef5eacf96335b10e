"""The harness for tests with several processes: a rank that dies is noticed at once, and named."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.forked import Forked
from tests.trainer.backends.world import run_world

AT_ONCE = 20.0
"""Far less than any time limit of a test, and enough to fork on a busy machine."""


def answer(rank: int, answers) -> None:
    answers.send(rank)
    answers.send(-rank)


def die(rank: int, how: str, answers) -> None:
    answers.send("begun")
    if rank == 1:
        exec(how)
    time.sleep(600)


def die_in_world(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGILL)


def test_answers_and_end() -> None:
    with Forked(answer, [(rank,) for rank in range(3)]) as ranks:
        found = ranks.take(4) + ranks.take(2)
        assert sorted(found) == [-2, -1, 0, 0, 1, 2]
        ranks.end()
        with pytest.raises(AssertionError, match="all ranks ended, after 0 of 1 answers"):
            ranks.take(1)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("os.kill(os.getpid(), signal.SIGILL)", "rank 1: it was ended by SIGILL"),
        ("os._exit(7)", "rank 1: it ended with exit code 7"),
        ("{}['absent']", "(?s)rank 1:.*KeyError: 'absent'"),
    ],
)
def test_a_rank_that_dies_ends_the_test_at_once(how: str, named: str) -> None:
    began = time.monotonic()
    with Forked(die, [(rank, how) for rank in range(2)]) as ranks:
        with pytest.raises(AssertionError, match=named):
            ranks.take(3)
        processes = ranks._processes
    assert time.monotonic() - began < AT_ONCE
    assert not any(process.is_alive() for process in processes)


def test_ranks_that_do_nothing_are_waited_for_no_longer_than_allowed() -> None:
    with Forked(die, [(0, "")]) as ranks:
        assert ranks.take(1) == ["begun"]
        with pytest.raises(AssertionError, match=r"nothing within 0.1 s from ranks \[0\]"):
            ranks.end(seconds=0.1)


def test_a_rank_of_a_world_that_dies_ends_the_test_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1: it was ended by SIGILL"):
        run_world(2, die_in_world)
    assert time.monotonic() - began < AT_ONCE
