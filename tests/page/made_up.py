"""Made-up runs to look at. What they say was computed by nobody.

`python -m tests.page.made_up FOLDER [STEPS [RESPONSES]]` makes a long one: 10,000 steps and a million responses unless
said otherwise.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import msgspec
import numpy as np

from streamrl.records.rollouts import FOLDER, OVER_AGE, PROMPT, TRAINED, KeptGroup
from streamrl.records.rollouts_writer import RolloutWriter
from streamrl.types import NO_VERSION
from tests.evaluations import make_report
from tests.launch.statuses import EPOCH, step_report
from tests.runs import write_lines, write_run

PROMPT_TEXT = "What is 3 + 4? "
HOSTILE = (
    "<script>document.title = 'run by a response'; window.hacked = 1</script>"
    "<img src=x onerror=\"window.hacked = 1\"><svg onload='window.hacked = 1'></svg>"
    "</td></table><iframe srcdoc='<script>parent.hacked = 1</script>'></iframe>"
    "\u202e&lt;b&gt; javascript:hacked=1\n```\x00\x1b[31m"
)


def made_up_group(step: int, seq: int, texts: list[str], *, rewards: list[float]) -> KeptGroup:
    """A group whose responses are `texts`, one token for each three characters."""
    chance = np.random.default_rng((step, seq))
    prompt = [PROMPT_TEXT[i : i + 3] for i in range(0, len(PROMPT_TEXT), 3)]
    pieces = [[*prompt, *(text[i : i + 3] for i in range(0, len(text), 3))] for text in texts]
    seqlens = np.array([len(p) for p in pieces], np.int32)
    sampled = np.concatenate([np.arange(n) >= len(prompt) for n in seqlens])
    count = len(sampled)
    uses = np.where(sampled, TRAINED, PROMPT).astype(np.uint8)
    late = sampled & (chance.random(count) < 0.1)
    uses[late] = OVER_AGE
    logprobs = np.where(sampled, -3 * chance.random(count) ** 4, 0).astype(np.float32)
    return KeptGroup(
        step=step,
        seq=seq,
        time=EPOCH + 2.0 * step,
        worker="rollout/0",
        gserver="gserver/0",
        prompt_length=len(prompt),
        prompt_chars=len(PROMPT_TEXT),
        finish_reasons=["stop"] * len(texts),
        texts=[PROMPT_TEXT + text for text in texts],
        reward_parts=[{"right": reward, "short": 0.5} for reward in rewards],
        seqlens=seqlens,
        rewards=np.array(rewards, np.float32),
        episodes=np.arange(len(texts), dtype=np.int32),
        input_ids=chance.integers(0, 50_000, count).astype(np.int32),
        text_ends=np.concatenate([np.cumsum([len(piece) for piece in p]) for p in pieces]).astype(np.int32),
        behavior_logprobs=logprobs,
        policy_versions=np.where(sampled, max(0, step - 1 - seq % 3), NO_VERSION).astype(np.int32),
        token_uses=uses,
        advantages=np.where(sampled, np.repeat(np.array(rewards) - np.mean(rewards), seqlens), 0).astype(np.float32),
        proximal_logprobs=(logprobs + np.where(sampled, 1e-3 * chance.standard_normal(count), 0)).astype(np.float32),
    )


def branching_group(step: int, seq: int) -> KeptGroup:
    """One episode of an agent in three trajectories, which begin alike."""
    group = made_up_group(step, seq, ["abcdefghi", "abcdefxyz", "abcxyz"], rewards=[1.0, 1.0, 0.0])
    group.episodes = np.zeros(3, np.int32)
    ids = [[*range(5), *own] for own in ([10, 11, 12], [10, 11, 22], [10, 31])]
    group.input_ids = np.concatenate(ids).astype(np.int32)
    return group


def made_up_run(folder: Path, *, steps: int = 40, hostile: bool = False) -> Path:
    """A run with evaluations, rollouts and logs; `hostile`: what is text in it tries to be HTML."""
    write_run(folder, steps=steps, gservers=2)
    reports = [make_report(v, time=EPOCH + 2.0 * v, reward_mean=0.9 * v / steps) for v in range(0, steps + 1, 8)]
    write_lines(folder / "evaluations.jsonl", [msgspec.to_builtins(report, str_keys=True) for report in reports])
    (folder / "logs").mkdir()
    said = HOSTILE.replace("\n", " ") if hostile else "joined at http://127.0.0.1:5000"
    (folder / "logs" / "gserver-0.log").write_text(
        f"12:00:01 INFO    gserver/0 {said}\n12:00:02 WARNING gserver/0 late\n"
    )
    (folder / "logs" / "controller-0.log").write_text("12:00:00 INFO    controller/0 listens\n")
    writer = RolloutWriter(folder / FOLDER / "rank-0", most_bytes=2**30, policy_version=0)
    for step in range(1, steps + 1):
        answers = [HOSTILE if hostile else f"The answer is {3 + 4 + n}, I think." for n in range(4)]
        writer.append(made_up_group(step, step, answers, rewards=[1.0, 0.0, 0.0, 0.25]))
    writer.write()
    if hostile:
        lines = (folder / "timeline.jsonl").read_text()
        (folder / "timeline.jsonl").write_text(lines.replace("3 groups", msgspec.json.encode(HOSTILE).decode()[1:-1]))
        config = (folder / "config.toml").read_text()
        (folder / "config.toml").write_text(
            config.replace('path = "scratch"', f"path = {msgspec.json.encode(HOSTILE).decode()}")
        )
    return folder


def long_run(folder: Path, *, steps: int = 10_000, responses: int = 1_000_000) -> Path:
    """A run of many steps; each keeps one group with as many siblings as make so many responses in all."""
    write_run(folder, steps=4, gservers=2, seconds=1.0)
    siblings = max(1, responses // steps)
    encoder = msgspec.json.Encoder()
    with (folder / "metrics.jsonl").open("wb") as file:
        for step in range(1, steps + 1):
            report = step_report(step, seconds=2.0)
            metrics = {f"figure_{i}": math.sin(step / 50 + i) for i in range(40)} | report.metrics
            file.write(encoder.encode(msgspec.structs.replace(report, metrics=metrics)) + b"\n")
    beats = []
    for second in range(0, 2 * steps, max(1, 2 * steps // 7_000)):  # as much as a run keeps (`timeline.MAX_BYTES`)
        for role, count in (("gserver", 4), ("rollout", 2), ("controller", 1)):
            for index in range(count):
                stats = {
                    "tokens_generated_total": 420.0 * second, "busy_seconds_total": 0.8 * second, "running": 12.0,
                    "pause_seconds_total": 0.03 * second, "processor_seconds_total": 0.5 * second, "queued": 1.0,
                }  # fmt: skip
                waits = "3 groups" if role == "controller" and second % 7 else ""
                beat = {"kind": "heartbeat", "time": EPOCH + second, "role": role, "index": index, "stats": stats}
                beats.append({**beat, "waiting_for": waits})
    write_lines(folder / "timeline.jsonl", beats)
    writer = RolloutWriter(folder / FOLDER / "rank-0", most_bytes=2**34, policy_version=0)
    texts = [f"The answer is {n}." for n in range(siblings)]
    rewards = [n / siblings for n in range(siblings)]
    group = made_up_group(1, 1, texts, rewards=rewards)
    for step in range(1, steps + 1):
        group.step, group.seq, group.time = step, step, EPOCH + 2.0 * step
        writer.append(group)
        if writer.full:
            writer.write()
    writer.write()
    return folder


if __name__ == "__main__":
    target, *sizes = sys.argv[1:]
    long_run(Path(target), **dict(zip(("steps", "responses"), map(int, sizes), strict=False)))
