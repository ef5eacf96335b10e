"""A real Slurm on this machine: one slurmctld and several slurmds, each a node, all on the loopback address.

From Debian's packages, which `make slurm` unpacks without installing them: no root, no services, no munge, no cgroups.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / ".slurm"
NODES = ("n1", "n2", "n3")
CORES = 8
"""That each node claims to have: nothing is bound to one."""
CREDENTIALS_SECONDS = 10
"""How long credentials of jobs are good. A job that is put back into the queue, by `scontrol requeue` or because a node
did not answer when it was to start there, waits as long before it starts again; Slurm's own value is two minutes."""
PATIENCE = 120.0

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire={credentials_seconds}
CredType=cred/none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
PluginDir={plugins}
SlurmctldPort={port}
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmdSpoolDir={root}/spool/%n
StateSaveLocation={root}/state
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
SlurmdTimeout=5
KillWait=5
MailProg=/bin/true
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
{nodes}
PartitionName=p Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""


def missing() -> str:
    """Why there is no Slurm for tests; empty if there is."""
    return "" if (UNPACKED / ".unpacked").exists() else "no Slurm: `make slurm` brings one"


class SlurmCluster:
    """Starts with `with`; nothing of it is left behind."""

    def __init__(self, root: Path) -> None:
        libraries = next(UNPACKED.glob("usr/lib/*/slurm-wlm"))
        self._root = root
        self._binaries = UNPACKED / "usr" / "sbin"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        for folder in ("state", *(f"spool/{node}" for node in NODES)):
            (root / folder).mkdir(parents=True)
        self._file = root / "slurm.conf"
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CORES}"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        self._file.write_text(
            CONFIGURATION.format(
                host=host,
                user=getpass.getuser(),
                plugins=libraries,
                port=ports[0],
                root=root,
                nodes=nodes,
                credentials_seconds=CREDENTIALS_SECONDS,
            )
        )
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self._file),
            "LD_LIBRARY_PATH": f"{libraries.parent}:{libraries}",
            "PATH": f"{UNPACKED / 'usr' / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> SlurmCluster:
        self._start("slurmctld", "slurmctld-wlm", "-D", "-f", str(self._file))
        for node in NODES:
            self.give_back(node)
        self.until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        for node in NODES:
            self.take_away(node)
        daemon = self._daemons.pop("slurmctld")
        daemon.kill()
        daemon.wait()

    def until_ready(self) -> None:
        """Wait until all nodes answer and have nothing to do: a job that is given one that does not answer (`idle*`) is
        put back into the queue."""
        self.until(lambda: self.command("sinfo", "-h", "-o", "%D %t") == f"{len(NODES)} idle", "idle nodes")

    def take_away(self, node: str) -> None:
        """End its slurmd and everything that runs on it, at once, as if its power had failed."""
        daemon = self._daemons.pop(node, None)
        if daemon is not None:
            daemon.kill()
            daemon.wait()
        for process in processes_on(node, self._file):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def give_back(self, node: str) -> None:
        self._start(node, "slurmd-wlm", "-D", "-N", node, "-f", str(self._file),
                    "-d", str(self._binaries / "slurmstepd-wlm"))  # fmt: skip

    def command(self, *words: str) -> str:
        """Run a command of Slurm, which must succeed; return what it prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def answers(self, node: str) -> bool:
        """Whether the controller takes it to be there."""
        state = self.command("scontrol", "show", "node", node).partition("State=")[2].split()[0]
        return "DOWN" not in state and not state.endswith("*")

    def state(self, job: str) -> str:
        """Of a job, in Slurm's word."""
        return self.command("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").splitlines()[0]

    def until(self, true: Callable[[], object], what: str, *, seconds: float = PATIENCE) -> None:
        """Wait until `true()`; the test fails after `seconds`, with what Slurm says."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, (
                f"waited {seconds:.0f} s for {what} in vain\n{self.command('scontrol', 'show', 'job')}\n"
                f"{self.command('sinfo', '-N')}\n{(self._root / 'slurmctld.log').read_text()[-3000:]}"
            )
            time.sleep(0.1)

    def _start(self, name: str, *command: str) -> None:
        program, *words = command
        with (self._root / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [str(self._binaries / program), *words], env=self.environment, stdout=output, stderr=output
            )


def processes_on(node: str, file: Path) -> list[psutil.Process]:
    """What Slurm has started on a node of the cluster with the configuration `file`: daemons of steps, and tasks."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get("SLURM_CONF") == str(file) and environment.get("SLURMD_NODENAME") == node:
            found.append(process)
    return found


def _free_ports(count: int) -> Sequence[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
