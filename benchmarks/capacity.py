"""The divisions of GPUs that docs/scale.md works out: nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator

from streamrl.planner.capacity import Division, Job, Machine, TrainerLayout, division
from streamrl.planner.shapes import Shape, shape_of

JOB = Job(context=32768, mean_context=8192)
DIVISIONS = (
    ("7B", 8, TrainerLayout(data=6), 2, 1),
    ("7B", 8, TrainerLayout(data=3, context=2), 2, 1),
    ("7B", 8, TrainerLayout(data=3, tensor=2), 1, 2),
    ("32B", 32, TrainerLayout(data=24), 2, 4),
    ("32B", 32, TrainerLayout(data=6, context=4), 2, 4),
    ("32B", 32, TrainerLayout(data=3, tensor=8), 2, 4),
    ("32B", 64, TrainerLayout(data=12, context=4), 4, 4),
    ("70B", 64, TrainerLayout(data=48), 2, 8),
    ("70B", 64, TrainerLayout(data=12, context=4), 2, 8),
    ("70B", 64, TrainerLayout(data=3, tensor=8, pipeline=2), 2, 8),
    ("70B", 64, TrainerLayout(data=3, tensor=8, context=2), 2, 8),
    ("70B", 128, TrainerLayout(data=12, context=8), 4, 8),
    ("Qwen3-30B-A3B", 16, TrainerLayout(data=3, context=4), 1, 4),
    ("Qwen3-30B-A3B", 32, TrainerLayout(data=6, context=4, expert=8), 2, 4),
)
"""Model, GPUs, the trainer's layout, gservers and GPUs of each."""


def divisions() -> Iterator[tuple[Machine, Shape, Division]]:
    """Each of `DIVISIONS`, of H100s in hosts of eight; also those that do not fit."""
    for name, gpus, layout, gservers, tensor in DIVISIONS:
        machine, shape = Machine(gpus=gpus), shape_of(name)
        found = division(shape, machine, JOB, layout=layout, gservers=gservers, server_tensor=tensor)
        yield machine, shape, found
