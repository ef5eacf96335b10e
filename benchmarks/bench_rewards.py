"""The cost for a rollout worker of having a response scored in a reward process.

    python benchmarks/bench_rewards.py [--quick]

Groups of 16 responses are scored in two processes, once with calls sent together as streamrl does it, and once one at
a time (`AHEAD_SECONDS = 0`); both take turns, and the least of the rounds counts. The cost is processor time for each
response, of the worker and of its reward processes. The reward is the one of examples/copy_scratch.toml.
"""

from __future__ import annotations

import asyncio
import time

import psutil
import uvloop
from common import Row, parser_of, report

from streamrl import userland
from streamrl.config import from_dict
from streamrl.rollout.reward.functions import Response
from streamrl.rollout.reward.pool import RewardPool
from streamrl.types import Prompt

SIBLINGS = 16
AT_ONCE = 8
"""Groups that are scored at the same time."""
TOGETHER, ALONE = "together", "one at a time"
AHEAD = {TOGETHER: userland.AHEAD_SECONDS, ALONE: 1e-9}
PROMPT = Prompt(seq=0, index=0, epoch=0, messages=[], input_ids=[1, 2, 3, 4, 5], answer="1234", metadata={})
RESPONSE = Response(text="1234", finish_reason="stop", output_tokens=5)


REWARDS = {"copy": ("streamrl.rollout.tasks:copy_reward", 800)}
"""The function, and how many groups are scored in a round."""


async def cost(function: str, way: str, *, groups: int) -> dict[str, float]:
    """Score the responses of so many groups; microseconds of each."""
    userland.AHEAD_SECONDS = AHEAD[way]
    pool = RewardPool(from_dict({"rollout": {"reward": {"function": function, "processes": 2}}}))
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


def measure(function: str, *, groups: int, rounds: int) -> list[Row]:
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
    quick = parser_of(__doc__, quick="two rounds in place of five").parse_args().quick
    rows: list[Row] = []
    for name, (function, groups) in REWARDS.items():
        rows += [{"reward": name, **row} for row in measure(function, groups=groups, rounds=2 if quick else 5)]
    settings = {"siblings": SIBLINGS, "groups_at_once": AT_ONCE, "processes": 2, "quick": quick}
    report("bench_rewards", settings, rows)


if __name__ == "__main__":
    main()
