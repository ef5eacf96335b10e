"""Stand-in components in the place of those that a `streamrl` command starts (`tests.e2e.harness.calling`)."""

from functools import partial

from streamrl.launch import local, pool
from tests.launch.standins import COMPONENTS


def use_standins() -> None:
    local.run_locally = partial(local.run_locally, components=COMPONENTS)
    pool.run_trainer = partial(pool.run_trainer, components=COMPONENTS)
    pool.Pool = partial(pool.Pool, components=COMPONENTS)  # type: ignore[assignment, misc]
