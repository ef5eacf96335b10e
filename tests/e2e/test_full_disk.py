"""A run whose disk is full for a while."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.harness import COPY_SCRATCH, QUICK, overrides, start, steps, until, wait_for_steps

OWN_DISK = 'mount -t tmpfs -o size=16m tmpfs {} && exec "$@"'


def own_disks() -> bool:
    """Whether this machine lets a test have a disk of its own."""
    if shutil.which("unshare") is None:
        return False
    return (
        subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0
    )


def fill(filler: Path) -> None:
    """Until there is no room."""
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"0" * 4096)
        except OSError:
            return


@pytest.mark.skipif(not own_disks(), reason="no file system can be mounted here")
def test_a_run_goes_on_while_its_disk_is_full_and_says_so(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    settings = QUICK | {"run__total_train_steps": 4000, "run__stop_at_reward": 2.0, "trainer__save_every": "5 steps"}
    mounted = ["unshare", "-rm", "sh", "-c", OWN_DISK.format(disk), "sh"]
    process = start(COPY_SCRATCH, overrides(disk, "full", **settings), within=mounted)

    def until_said(words: str) -> None:
        until(lambda: words in process.said or not process.running, words, seconds=60)
        assert process.running, process.output[-4000:]

    try:
        as_it_sees_it = Path(f"/proc/{process.pid}/root{disk}")
        run_dir = as_it_sees_it / "full"
        wait_for_steps(run_dir, 3)
        filler = as_it_sees_it / "filler"
        fill(filler)
        before = len(steps(run_dir))
        until_said("No space left on device): the run continues; its logs are lost")
        time.sleep(5)
        assert process.running, process.output[-4000:]
        filler.unlink()
        until_said("can be written again")
        wait_for_steps(run_dir, before + 10)
        made = [step["step"] for step in steps(run_dir)]
        assert made == list(range(1, len(made) + 1)), "no figure is lost"
        process.signal(signal.SIGINT)
        assert process.exit_code(seconds=60) == 130
    finally:
        process.end()
