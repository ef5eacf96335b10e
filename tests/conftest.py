"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from streamrl.processor import avoid_broken_instructions

avoid_broken_instructions()  # before anything computes here or in what the tests start

# A shell makes its background processes ignore SIGINT, and children inherit that: tests interrupt programs they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes depends on what else runs; each run tries others, so half of hypothesis' 100 will do.
settings.register_profile("unhurried", deadline=None, max_examples=50)
settings.load_profile("unhurried")

CONTRACT = "tests/gserver/contract/"
HOSTS = "tests/hosts/"
TOGETHER = re.compile(rf"{CONTRACT}|tests/gserver/updates/faults/test_faults\.py::(test_a_server_|.*\[sglang)")
"""Tests that share servers which take long to start, by the beginning of their names."""
CLUSTERS = ("tests/launch/test_ray.py", "tests/launch/test_slurm.py")
"""The tests of each share a cluster."""
LONGEST_FIRST = (
    CONTRACT,
    "tests/e2e/test_chaos",
    "tests/e2e/test_learning",
    HOSTS,
    "tests/e2e/",
    *CLUSTERS,
    "tests/test_stale_loop",
    "tests/trainer/backends/",
)
"""Tests of these take much longer than all others: whoever begins with one of them last would be waited for. Some wait
most of the time, others take several processors."""
EXTRA = (
    HOSTS,
    *CLUSTERS,
    "tests/page/test_browser",
    "tests/gserver/updates/faults/",
    "tests/e2e/test_agents",
    "tests/e2e/test_chaos",
    "tests/e2e/test_collapse",
    "tests/e2e/test_failed_siblings",
    "tests/e2e/test_failures",
    "tests/e2e/test_full_disk",
    "tests/e2e/test_security",
    "tests/e2e/test_sglang",
    "tests/e2e/test_tasks",
    "tests/e2e/test_vllm",
    "tests/planner/test_calibration.py::test_a_short_run_is_made_and_read",
    "tests/test_learning_gpu.py::test_a_run",
    "tests/test_notebook",
    "tests/test_release.py::test_a_wheel",
    "tests/test_stale_loop",
    "tests/trainer/backends/test_megatron.py::test_layouts_equal_transformers[8]",
)
"""Tests of `make test-all` that `make test` leaves out, by the beginning of their names: clusters, hosts, a browser,
the notebook, the wheel, a benchmark of learning, eight Megatron ranks, a run of two tasks, long runs with faults. All
that need a real SGLang are left out, too."""
RUNS = ("tests/e2e/", HOSTS)
RUN_SECONDS = 900
"""For a test of whole runs, which a busy machine may hold up."""

gc.disable()  # while torch and the like are imported, which stay: see streamrl.hooks


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Under `make coverage`, attribute the lines that run from now on to the test, in subprocesses as well."""
    coverage = sys.modules.get("coverage")
    if coverage is not None and (measured := coverage.Coverage.current()) is not None:
        os.environ["COVERAGE_CONTEXT"] = nodeid
        measured.switch_context(nodeid)


class Scheduling(LoadScopeScheduling):
    """Each test to whatever process is free next, but those of `TOGETHER` to one, and those of a cluster. The last
    process leaves those of `LONGEST_FIRST` to the others while there are any else: so whole runs do not all come at the
    same time."""

    def _split_scope(self, nodeid: str) -> str:
        if TOGETHER.match(nodeid):
            return CONTRACT
        return next((file for file in CLUSTERS if nodeid.startswith(file)), nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if node is self.nodes[-1] and len(self.nodes) > 1:
            quick = next((scope for scope in self.workqueue if not scope.startswith(LONGEST_FIRST)), None)
            if quick is not None:
                self.workqueue.move_to_end(quick, last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_length)
    for item in items:
        if item.nodeid.startswith(EXTRA) or re.search(r"[\[-](sglang|vllm)", item.nodeid):
            item.add_marker(pytest.mark.extra)
        if item.nodeid.startswith(RUNS) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(RUN_SECONDS))


def _length(item: pytest.Item) -> int:
    """Place in `LONGEST_FIRST`; behind its end for all other tests."""
    return next((i for i, prefix in enumerate(LONGEST_FIRST) if item.nodeid.startswith(prefix)), len(LONGEST_FIRST))
