"""A loop of your own over agents: tasks come from a Parquet file, and one process generates and trains.

The agents run in child processes. They ask a model server as they would ask OpenAI; their prompts reach the loop
through `pool.prompts`, and their rounds are trained on once they are scored.

Try it:

    python examples/single_controller.py [TASKS.parquet]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from openai import AsyncOpenAI

import streamrl
from streamrl.config import from_dict
from streamrl.task_pool import create_and_launch_task_pool

GROUPS = 8
"""Tasks in a training batch."""
SETTINGS: dict[str, Any] = {
    "model": {
        "path": "scratch",
        "scratch": {"alphabet": "01234!", "hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 32},
    },
    "rollout": {
        "group_size": 8,
        "agent": {"function": "examples.single_controller:solve"},
        "sampling": {"max_new_tokens": 1},  # a digit
    },
    "data": {"max_prompt_tokens": 8},
    "gserver": {"max_context": 32},
    "trainer": {"lr": 4e-3, "dtype": "float32", "batch_groups": GROUPS, "optimizer": {"warmup_steps": 2}},
}
_client = AsyncOpenAI(base_url="http://localhost", api_key="of each episode")


async def solve(task: dict[str, Any], policy: Any) -> None:
    """Ask for the digit after the one in the task; a wrong answer may be corrected once, for half of the score."""
    client = _client.with_options(base_url=policy.base_url, api_key=policy.api_key)
    messages: list[Any] = list(task["messages"])
    score = 0.0
    for worth in (1.0, 0.5):
        reply = await client.chat.completions.create(model=policy.model, messages=messages)
        text = reply.choices[0].message.content or ""
        if text == task["answer"]:
            score = worth
            break
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "!"}]
    await asyncio.to_thread(policy.notify_score, score)


async def train(tasks: Iterator[dict[str, Any]], *, steps: int) -> list[float]:
    """Train for so many steps; return the mean reward of each."""
    config = from_dict(SETTINGS, where="examples/single_controller.py")
    trainer = streamrl.TorchTrainer(config)
    rewards: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with (
            streamrl.EmbeddedEngine(folder=trainer.folder, max_context=32, max_running=128) as engine,
            create_and_launch_task_pool(config, folder=trainer.folder) as pool,
        ):
            while trainer.policy_version < steps:
                while pool.unfinished < GROUPS:
                    pool.enqueue_task(next(tasks))
                prompts = await pool.prompts.sample(64, seconds=0.02)
                responses = await engine.generate([p.input_ids for p in prompts], [p.params for p in prompts])
                pool.rounds.put_batch(prompts, responses)
                batch = pool.rounds.sample(GROUPS)
                if batch is None:
                    continue
                figures = await asyncio.to_thread(trainer.train_step, batch)
                await engine.load(trainer.save(Path(folder)), str(trainer.policy_version))
                rewards.append(figures["reward_mean"])
                print(f"step {trainer.policy_version}: reward {rewards[-1]:.2f}", flush=True)
    return rewards


def write_tasks(file: Path) -> None:
    """Write five tasks as a Parquet file."""
    tasks = [{"question": str(digit), "answer": str((digit + 1) % 5)} for digit in range(5)]
    pq.write_table(pa.Table.from_pylist(tasks), file)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        chosen = Path(sys.argv[1]) if sys.argv[1:] else Path(made) / "tasks.parquet"
        if not sys.argv[1:]:
            write_tasks(chosen)
        asyncio.run(train(cycle(pq.read_table(chosen).to_pylist()), steps=40))
