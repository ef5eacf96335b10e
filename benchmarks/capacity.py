"""The divisions of GPUs that docs/scale.md works out: nothing is measured here."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from streamrl.planner.capacity import Division, Machine, Roles, Workload, division
from streamrl.planner.shapes import Shape, shape_of
from streamrl.trainer.layout import Layout

JOB = Workload(context=32768, mean_context=8192)
DIVISIONS = (
    ("7B", 8, Layout(data=6), 2, 1),
    ("7B", 8, Layout(data=3, context=2), 2, 1),
    ("7B", 8, Layout(data=3, tensor=2), 1, 2),
    ("32B", 32, Layout(data=24), 2, 4),
    ("32B", 32, Layout(data=6, context=4), 2, 4),
    ("32B", 32, Layout(data=3, tensor=8), 2, 4),
    ("70B", 64, Layout(data=48), 2, 8),
    ("70B", 64, Layout(data=12, context=4), 2, 8),
    ("70B", 64, Layout(data=3, tensor=8, pipeline=2), 2, 8),
    ("70B", 128, Layout(data=12, context=8), 4, 8),
    ("Qwen3-30B-A3B", 16, Layout(data=3, context=4), 1, 4),
    ("Qwen3-30B-A3B", 32, Layout(data=6, context=4, expert=8), 2, 4),
)
"""Model, GPUs, the trainer's layout, gservers and GPUs of each."""
ROLES = (
    ("7B", 8, Layout(data=3, context=2), 2, 1, Roles(critic=True, reference=True)),
    ("7B", 8, Layout(data=3, context=2), 2, 1, Roles(lora_rank=32, reference=True)),
    ("32B", 16, Layout(data=2, context=4), 2, 4, Roles(lora_rank=32)),
    ("70B", 32, Layout(data=2, context=8), 2, 8, Roles()),
    ("70B", 32, Layout(data=2, context=8), 2, 8, Roles(lora_rank=32)),
    ("70B", 128, Layout(data=6, context=16), 4, 8, Roles(critic=True, reference=True)),
)
"""The same with other roles."""


def divisions() -> Iterator[tuple[Machine, Shape, Division]]:
    """Each of `DIVISIONS`, of H100s in hosts of eight; also those that do not fit."""
    for name, gpus, layout, gservers, tensor in DIVISIONS:
        yield _divided(name, gpus, layout, gservers, tensor, Roles())


def divisions_with_roles() -> Iterator[tuple[Machine, Shape, Division, Roles]]:
    """Each of `ROLES`, likewise."""
    for row in ROLES:
        yield *_divided(*row), row[-1]


def _divided(
    name: str, gpus: int, layout: Layout, gservers: int, tensor: int, roles: Roles
) -> tuple[Machine, Shape, Division]:
    machine, shape, job = Machine(gpus=gpus), shape_of(name), msgspec.structs.replace(JOB, roles=roles)
    return machine, shape, division(shape, machine, job, layout=layout, gservers=gservers, server_tensor=tensor)
