"""Stand-in components in the place of those that a `streamrl` command starts (`tests.e2e.harness.calling`)."""

from streamrl.launch import processes
from tests.launch.standins import COMPONENTS


def use_standins() -> None:
    processes.COMPONENTS.update(COMPONENTS)
