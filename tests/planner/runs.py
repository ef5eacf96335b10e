"""Made-up run folders whose costs are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config import from_dict, to_toml
from streamrl.records.metrics import StepReport

EPOCH = 1_790_000_000.0
STEP, REQUEST, PROMPT = 0.004, 0.0005, 0.0002
"""Processor seconds of a decode step, of a request in it, and of a token of a prompt."""
SECONDS = 2.0
"""Of a training step."""
LENGTHS = [[10, 20], [30, 20], [5, 15], [20, 40]]
GROUP, REWARD, CONTROL, USED = 0.01, 0.003, 0.004, 1.2
"""Processor seconds of a rollout worker for a group, of a reward process for a response, of the controller for a
group, and of the trainer for a step."""

OTHERS = 0.2
"""Cores that other work on the machine keeps busy."""


def write_calibration(folder: Path, *, steps: int = 12, **sections: dict[str, Any]) -> Path:
    """A run on two cores: 4 groups of 2 siblings in a step, prompts of 50 tokens."""
    folder.mkdir(parents=True)
    tree: dict[str, Any] = {
        "run": {"name": folder.name, "device": "cpu"},
        "rollout": {"group_size": 2},
        "trainer": {"batch_groups": 4},
    }
    for section, entries in sections.items():
        tree[section] = {**tree.get(section, {}), **entries}
    (folder / "config.toml").write_text(to_toml(from_dict(tree)))
    reports = [_report(number) for number in range(1, steps + 1)]
    lines = [msgspec.to_builtins(report, str_keys=True) for report in reports]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    beats = [beat for second in range(int(steps * SECONDS) + 2) for beat in _beats(second)]
    (folder / "timeline.jsonl").write_text("".join(json.dumps(beat) + "\n" for beat in beats))
    return folder


def _report(number: int) -> StepReport:
    return StepReport(
        step=number,
        time=EPOCH + number * SECONDS,
        metrics={
            "groups": 4.0,
            "tokens_sampled": 160.0,
            "tokens_trained": 160.0,
            "tokens_masked": 0.0,
            "tokens_computed": 360.0,
            "step_seconds": SECONDS,
            "wait_seconds": 0.5,
            "train_seconds": 1.4,
            "update_seconds": 0.3,
            "publish_seconds": 0.2,
            "pause_seconds": 0.05,
            "blocked_seconds": 0.0,
        },
        token_ages={0: 160},
        response_lengths=LENGTHS,
    )


def _beats(second: int) -> list[dict[str, Any]]:
    """Counters grow evenly, but for what is decoded: more at once in every other second."""
    groups = 2.0 * second
    steps = tokens = slots = busy = used = 0.0
    for past in range(second):
        at_once = 4 if past % 2 else 1
        prompts = 100.0 + 20 * (past % 3)
        steps += 40
        tokens += 40 * at_once
        spent = 40 * (STEP + REQUEST * at_once) + PROMPT * prompts
        used += spent
        busy += 1.1 * spent
        slots += 1.1 * spent * at_once
    prompts_total = sum(100.0 + 20 * (past % 3) for past in range(second))
    stats: dict[tuple[str, int], dict[str, float]] = {
        ("gserver", 0): {
            "tokens_generated_total": tokens,
            "decode_steps_total": steps,
            "slot_seconds_total": slots,
            "busy_seconds_total": busy,
            "prompt_tokens_total": prompts_total,
            "prompt_tokens_cached_total": 200.0 * second - prompts_total,
            "requests_total": 4.0 * second,
            "processor_seconds_total": used,
        },
        ("rollout", 0): {
            "groups_done_total": groups,
            "groups_rejected_total": 0.0,
            "groups_filtered_total": 0.0,
            "reward_busy_seconds_total": 0.02 * 2 * groups,
            "processor_seconds_total": GROUP * groups,
            "children_processor_seconds_total": REWARD * 2 * groups,
        },
        ("model_worker", 0): {"processor_seconds_total": USED * second / SECONDS},
        ("controller", 0): {
            "processor_seconds_total": CONTROL * groups,
            "machine_processor_seconds_total": 1000.0
            + used
            + (GROUP + 2 * REWARD + CONTROL) * groups
            + USED * second / SECONDS
            + OTHERS * second,
        },
    }
    return [
        {"kind": "heartbeat", "time": EPOCH + second, "role": role, "index": index, "stats": figures}
        for (role, index), figures in stats.items()
    ]
