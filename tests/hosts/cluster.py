"""The commands of one run over several hosts, started as docs/clusters.md describes, each by its own command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.transport.secret import VARIABLE
from tests.e2e.harness import COPY_SCRATCH, SUPPORTED, Command, overrides, start_command, steps, until
from tests.hosts.network import Hosts

PORT = 7000
SECRET = "known-to-every-host"
LEASE_SECONDS = 5.0
MAX_STALENESS = 4
SMALL: dict[str, Any] = {
    "model__scratch__hidden_size": 64,
    "model__scratch__heads": 2,
    "model__scratch__kv_heads": 1,
    "data__args__digits": 1,
    "rollout__sampling__max_new_tokens": 4,
    "rollout__group_size": 8,
    "rollout__max_concurrent_groups": 16,
    "limits__request_seconds": 10,
    "trainer__data_parallel": 2,
    "trainer__batch_groups": 8,
    "trainer__lr": 3e-3,
    "trainer__save_at_end": "false",
    "staleness__max_staleness": MAX_STALENESS,
    "staleness__over_age": "wait",
    "limits__silence_seconds": LEASE_SECONDS,
    "limits__heartbeat_seconds": 0.5,
    "limits__update_seconds": 10,
    "weights__attempts": 10,
}


class Cluster:
    """The commands of one run, with the hosts on which each was started."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.commands: list[Command] = []
        self.settings: dict[str, Any] = SMALL

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self, host: int, role: str, *options: str, variables: Mapping[str, str] | None = None) -> Command:
        """Start `streamrl ROLE` on `host`."""
        joins = (
            ["--manager", f"http://{self.hosts.address(0)}:{PORT}"] if role != "controller" else ["--port", str(PORT)]
        )
        words = [role, str(COPY_SCRATCH), *overrides(self.folder, "run", **self.settings), *joins, *options]
        command = start_command(
            words,
            within=() if SUPPORTED else self.hosts.entering(host),
            holder=self.hosts.holder(host),
            variables={VARIABLE: SECRET, **(variables or {})},
        )
        self.commands.append(command)
        return command

    def rewards(self) -> list[float]:
        return [step["metrics"]["reward_mean"] for step in steps(self.run_dir)]


def wait_for_output(command: Command, pattern: str, *, after: int = 0, seconds: float = 120.0) -> None:
    """Wait until `command` has printed `pattern`, behind its first `after` characters."""
    until(lambda: re.search(pattern, command.output[after:]), f"{pattern!r}", seconds=seconds)


def name_of(command: Command) -> str:
    """Wait for the name of the process in the run, such as gserver/1."""
    wait_for_output(command, r"this process is \w+/\d+\n")
    return command.output.partition("this process is ")[2].partition("\n")[0]
