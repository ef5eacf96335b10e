"""What it costs a rollout worker to have a response scored in a reward process.

    python benchmarks/bench_rewards.py [--quick]

Groups of 16 responses are scored in two processes, once with calls sent together as streamrl does it, and once one at
a time (`AHEAD_SECONDS = 0`); both take turns, and the least of the rounds counts. The cost is processor time for each
response, of the worker and of its reward processes. The reward is that of examples/copy_scratch.toml.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

import psutil
import uvloop
from common import write_results
from rich.console import Console
from rich.table import Table

from streamrl.config import from_dict
from streamrl.rollout.reward import pool as module
from streamrl.rollout.reward.pool import RewardPool
from streamrl.rollout.reward.protocol import Response
from streamrl.types import Prompt

SIBLINGS = 16
AT_ONCE = 8
"""Groups that are scored at the same time."""
TOGETHER, ALONE = "together", "one at a time"
AHEAD = {TOGETHER: module.AHEAD_SECONDS, ALONE: 1e-9}
PROMPT = Prompt(seq=0, index=0, epoch=0, messages=[], input_ids=[1, 2, 3, 4, 5], answer="1234", metadata={})
RESPONSE = Response(text="1234", finish_reason="stop", output_tokens=5)


REWARDS = {"copy": ("streamrl.rollout.tasks:copy_reward", 800)}
"""The function, and how many groups are scored in a round."""


async def cost(function: str, way: str, *, groups: int) -> dict[str, float]:
    """Score the responses of so many groups; microseconds of each."""
    module.AHEAD_SECONDS = AHEAD[way]
    pool = RewardPool.of(from_dict({"rollout": {"reward": {"function": function, "processes": 2}}}))
    await pool.start()
    try:
        for count in (groups // 10, groups):  # first to warm up
            before, began = processor_seconds(), time.monotonic()
            await asyncio.gather(*(score(pool, share) for share in [count // AT_ONCE] * AT_ONCE))
            seconds = time.monotonic() - began
            worker, children = (now - then for now, then in zip(processor_seconds(), before, strict=True))
        each = 1e6 / (groups // AT_ONCE * AT_ONCE * SIBLINGS)
        return {"worker": each * worker, "processes": each * children, "seconds": each * seconds}
    finally:
        await pool.close()


async def score(pool: RewardPool, groups: int) -> None:
    for _ in range(groups):
        await asyncio.gather(*(pool.score(RESPONSE, PROMPT) for _ in range(SIBLINGS)))


def processor_seconds() -> tuple[float, float]:
    """Of this process, and of its children."""
    me = psutil.Process()
    return sum(me.cpu_times()[:2]), sum(sum(child.cpu_times()[:2]) for child in me.children(recursive=True))


def measure(function: str, *, groups: int, rounds: int) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, float]]] = {TOGETHER: [], ALONE: []}
    for _ in range(rounds):
        for way, costs in found.items():
            costs.append(uvloop.run(cost(function, way, groups=groups)))
    least = {way: {name: min(one[name] for one in costs) for name in costs[0]} for way, costs in found.items()}
    spent = {way: costs["worker"] + costs["processes"] for way, costs in least.items()}
    return [
        {"way": way, **{name: round(value, 1) for name, value in costs.items()}}
        | {"gain": round(spent[ALONE] / spent[way], 2)}
        for way, costs in least.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rounds in place of five")
    quick = parser.parse_args().quick
    console = Console()
    table = Table("reward", "calls are sent", title="microseconds for each response")
    for column in ("worker", "processes", "clock", "gain"):
        table.add_column(column, justify="right")
    rows = []
    for name, (function, groups) in REWARDS.items():
        for row in measure(function, groups=groups, rounds=2 if quick else 5):
            rows.append({"reward": name, **row})
            figures = (f"{row[column]:.0f}" for column in ("worker", "processes", "seconds"))
            table.add_row(name, row["way"], *figures, f"{row['gain']:.2f}")
    console.print(table)
    settings = {"siblings": SIBLINGS, "groups_at_once": AT_ONCE, "processes": 2, "quick": quick}
    console.print(f"written to {write_results('bench_rewards', settings, rows)}")


if __name__ == "__main__":
    main()
