"""What every heartbeat tells of the processor: that of the process, of its children, of the machine."""

from __future__ import annotations

import subprocess
import sys
import time

from streamrl.records.timeline import CHILDREN_SECONDS, PROCESSOR_SECONDS
from streamrl.transport.membership import machine_seconds, processor_seconds

BUSY = "import time; until = time.process_time() + 0.3\nwhile time.process_time() < until: pass\ninput()"


def test_own_processor_time_counts() -> None:
    before = processor_seconds()[PROCESSOR_SECONDS]
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert processor_seconds()[PROCESSOR_SECONDS] >= before + 0.05


def test_children_count_while_they_live() -> None:
    before, machine = processor_seconds()[CHILDREN_SECONDS], machine_seconds()
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        deadline = time.monotonic() + 60
        while processor_seconds()[CHILDREN_SECONDS] < before + 0.25:
            assert time.monotonic() < deadline, "the child's processor time was never seen"
            time.sleep(0.05)
        assert machine_seconds() >= machine + 0.2
        child.communicate(b"\n", timeout=60)
    assert processor_seconds()[CHILDREN_SECONDS] <= before + 0.2
