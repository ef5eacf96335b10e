"""The run's secret: where it is found, who may read it, and that it does not show."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from streamrl.config import Config, from_dict
from streamrl.errors import ConfigError
from streamrl.transport import secret as module
from streamrl.transport.secret import (
    DESCRIPTOR,
    VARIABLE,
    Secret,
    await_secret,
    given,
    left_for,
    of_new_run,
    of_run_at,
    read_file,
)

TEXT = "a-secret-that-tests-know"
URL = "http://127.0.0.1:4711"


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STREAMRL_CACHE", str(tmp_path / "cache"))
    for variable in (VARIABLE, DESCRIPTOR):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(module, "_held", [])


def with_file(path: Path) -> Config:
    return from_dict({"security": {"secret_file": str(path)}})


def test_it_does_not_show(capsys: pytest.CaptureFixture[str]) -> None:
    secret = Secret(TEXT, origin="here")
    print(secret, repr(secret), [secret], f"{secret}")  # noqa: T201
    assert TEXT not in capsys.readouterr().out
    assert TEXT not in secret.shown
    assert len({Secret.make().shown, Secret.make().shown, secret.shown, secret.key("shown2").hex()}) == 4
    assert secret.shown == Secret(TEXT, origin="there").shown


@pytest.mark.parametrize("text", ["", "short", "with blanks in between", "ü" * 20, "line\nbreak" * 4])
def test_what_is_no_secret_is_refused_and_not_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"security.secret_file = .* holds no secret") as error:
        read_file(path, setting="security.secret_file")
    assert not text or text not in str(error.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o644, 0o777])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    Secret(TEXT, origin="here").write(path)
    assert read_file(path, setting="x").shown == Secret(TEXT, origin="here").shown
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"open to others .mode {mode:04o}") as error:
        read_file(path, setting="security.secret_file")
    assert TEXT not in str(error.value)


def test_a_missing_file_is_made_by_the_manager_and_asked_for_by_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    with pytest.raises(ConfigError, match="bring the file from the manager's machine"):
        of_run_at(URL, with_file(path))
    made = of_new_run(with_file(path))
    assert path.stat().st_mode & 0o777 == 0o600
    found = of_run_at(URL, with_file(path))
    assert found is not None
    assert found.shown == made.shown == of_new_run(with_file(path)).shown


def test_the_environment_goes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    Secret.make().write(path)
    monkeypatch.setenv(VARIABLE, TEXT)
    assert of_new_run(with_file(path)).shown == Secret(TEXT, origin="here").shown
    monkeypatch.setenv(VARIABLE, "tooshort")
    with pytest.raises(ConfigError, match=VARIABLE) as error:
        given(with_file(path))
    assert "tooshort" not in str(error.value)


def test_who_joins_from_the_same_machine_finds_it_as_long_as_the_manager_is_there() -> None:
    secret = Secret.make()
    assert of_run_at(URL) is None
    with left_for(URL, secret) as path:
        assert path is not None
        assert path.stat().st_mode & 0o777 == 0o600
        found = of_run_at(URL + "/")
        assert found is not None
        assert found.shown == secret.shown
        assert of_run_at("http://127.0.0.1:4712") is None
    assert of_run_at(URL) is None


@contextmanager
def manager(begin: Callable[[str], object], *, after: float = 0.5) -> Iterator[str]:
    """The URL of a manager that calls `begin` with it and listens, `after` seconds from now."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{own.getsockname()[1]}"

        def start() -> None:
            begin(url)
            own.listen()

        later = threading.Timer(after, start)
        later.start()
        yield url
        later.join()


@pytest.mark.parametrize("after_another", [False, True], ids=["the first", "after one that was killed"])
def test_who_is_started_before_the_manager_waits_for_its_secret(after_another: bool) -> None:
    secret = Secret.make()
    with ExitStack() as stack, manager(lambda url: stack.enter_context(left_for(url, secret))) as url:
        if after_another:
            Secret.make().write(module._file_of(url))
        await_secret(url, from_dict({}))
        found = of_run_at(url)
        assert found is not None
        assert found.shown == secret.shown


def test_who_is_started_before_the_manager_waits_for_the_file_that_it_makes(tmp_path: Path) -> None:
    config = with_file(tmp_path / "new" / "secret")
    with manager(lambda _: of_new_run(config)) as url:
        await_secret(url, config)
        assert of_run_at(URL, config) is not None


@pytest.mark.parametrize("file", ["", "secret"], ids=["in the cache", "in a file"])
def test_a_manager_that_leaves_no_secret_here_is_not_waited_for(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVING_SECONDS", 0.5)
    config = with_file(tmp_path / file) if file else from_dict({})
    with manager(lambda _: None, after=0.0) as url:
        began = time.monotonic()
        await_secret(url, config)
        assert time.monotonic() - began < config.limits.start_seconds / 2


def test_a_child_is_given_it_by_a_pipe_and_gives_it_to_none_of_its_own() -> None:
    code = (
        "import os, sys; from streamrl.transport.secret import given; s = given(None); print(s.shown);"
        "assert given(None).shown == s.shown; assert 'STREAMRL_SECRET_FD' not in os.environ"
    )
    secret = Secret.make()
    with secret.handed_on() as pipe:
        child = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {DESCRIPTOR: str(pipe)},
            pass_fds=[pipe],
            capture_output=True,
            text=True,
            check=True,
        )
    assert child.stdout.strip() == secret.shown
