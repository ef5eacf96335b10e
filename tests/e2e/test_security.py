"""A run whose secret is known to the test: it is nowhere to be found, and the sockets are those that the docs list."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from streamrl.config import from_dict
from streamrl.transport.credentials import MAY_SEND_TO, GserverKeys, ReceiverKeys
from streamrl.transport.secret import VARIABLE, Secret
from tests.e2e.harness import COPY_SCRATCH, SMALL, assert_exactly_once, listening_by_role, overrides, start

SECRET = "fd1c0ffee-what-nobody-may-see-4711"
PAGE = Path(__file__).parents[2] / "docs" / "security.md"


def documented_sockets() -> dict[str, tuple[int, bool]]:
    """Role → how many sockets of streamrl's own it listens at, and whether torch adds some, as the page has it."""
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \| (\d+|some) \|", PAGE.read_text(), re.MULTILINE)
    assert rows
    return {role: (int(own), of_torch == "some") for role, own, of_torch in rows}


def test_the_secret_is_nowhere_and_the_sockets_are_the_documented_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET)
    monkeypatch.setenv("STREAMRL_LOG", "DEBUG")
    secret, config = Secret(SECRET, origin="here"), from_dict({})
    keys = GserverKeys.of(config, secret, 0)
    receivers = [ReceiverKeys.derive(secret, role) for role in MAY_SEND_TO]
    curve = {pair.secret.decode() for receiver in receivers for pair in (receiver.own, receiver.senders)}
    known = {SECRET, secret.shown, *keys, *curve, *(receiver.verification.hex() for receiver in receivers)}
    settings = overrides(
        tmp_path, "run", **SMALL, run__total_train_steps=3, weights__mode="collective", security__encryption="on"
    )
    run_dir = tmp_path / "run"
    seen: set[str] = set()
    sockets: dict[str, set[int]] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.3):
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    seen.update(process.cmdline())
            for role, _, port in listening_by_role(run_dir):
                sockets.setdefault(role, set()).add(port)

    watcher = threading.Thread(target=watch)
    watcher.start()
    process = start(COPY_SCRATCH, settings)
    try:
        said = process.ends_well(seconds=400)
    finally:
        process.end()
        over.set()
        watcher.join()
    assert_exactly_once(run_dir)
    tokens = re.compile(r"(rollout|gserver|controller|model_worker)/\d+\.[0-9a-f]{64}")
    for where, text in [("output", said), ("command lines", "\n".join(seen))] + [
        (str(file), file.read_bytes().decode("latin-1")) for file in run_dir.rglob("*") if file.is_file()
    ]:
        assert not [key for key in known if key in text], where
        assert not tokens.search(text), where
    for role, (own, and_more) in documented_sockets().items():
        found = len(sockets.get(role, ()))
        assert found >= own if and_more else found == own, (role, sockets)
    assert sockets.keys() <= documented_sockets().keys() | {"run", "checkpoint"}, sockets


def test_a_run_goes_on_under_hostile_messages() -> None:
    """A short version of `benchmarks/fuzz.py`, which fails when anything is accepted or the run suffers."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "benchmarks" / "fuzz.py"), "--messages", "150"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-3000:]
