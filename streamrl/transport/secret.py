"""The run's one secret: its sources, its storage, and the keys derived from it.

A process with the secret is an owner of the run. The manager makes or reads it. Every other process joins once with a
key derived from it, and then receives what its role needs (`RegisterReply`). A process looks for it in this order:

1. the pipe through which its launcher passes it;
2. the environment variable `STREAMRL_SECRET`;
3. the file in `security.secret_file`, which only its owner may be able to read;
4. a file of the same kind in this user's cache, written by the manager at that URL, for processes that are started by
   hand on the same machine.

Invariant: it is in no command line, log, error, or run folder, and user code is started without it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from streamrl.config import Config
from streamrl.disk import cache_home
from streamrl.errors import ConfigError
from streamrl.transport.addresses import is_loopback

VARIABLE = "STREAMRL_SECRET"
"""Environment variable: the secret itself."""
DESCRIPTOR = "STREAMRL_SECRET_FD"
"""Environment variable: file descriptor of the pipe through which a launcher passes the secret."""
LEAST_CHARACTERS = 16
LOOK_SECONDS = 0.2
"""Delay between two attempts to find a manager that is not there yet."""
LEAVING_SECONDS = 2.0
"""Time within which a listening manager has written its secret, if it writes it on this machine."""
_MOST_BYTES = 4096

log = logging.getLogger(__name__)


def is_usable(text: str) -> bool:
    """Whether `text` may be a secret or a key: long enough, printable, without spaces."""
    return len(text) >= LEAST_CHARACTERS and text.isascii() and text.isprintable() and " " not in text


class Secret:
    """A secret, hidden in its printed form."""

    __slots__ = ("_text",)

    def __init__(self, text: str, *, origin: str) -> None:
        """`origin` names its source. Raises `ConfigError` if it is too short, or contains blanks."""
        if not is_usable(text):
            raise ConfigError(
                f"{origin} holds no secret (at least {LEAST_CHARACTERS} printable characters without spaces); "
                "make one with: openssl rand -hex 32"
            )
        self._text = text

    def __repr__(self) -> str:
        return "Secret(…)"

    @classmethod
    def make(cls) -> Secret:
        """Return a new secret of 256 random bits."""
        return cls(secrets.token_hex(32), origin="a new secret")

    def key(self, purpose: str) -> bytes:
        """Return the 32-byte key for one purpose. It reveals nothing about the secret or other keys (HMAC-SHA256, RFC
        2104)."""
        return hmac.digest(self._text.encode(), f"streamrl {purpose}".encode(), "sha256")

    @property
    def shown(self) -> str:
        """Key that a process sends to the manager: the secret itself never travels."""
        return self.key("shown").hex()

    @property
    def revealed(self) -> str:
        """The secret itself, for a launcher that passes it on without a pipe."""
        return self._text

    def write(self, path: Path) -> None:
        """Write it to a file that only its owner can read. Raises `OSError`."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{self._text}\n")
        new.replace(path)

    @contextmanager
    def handed_on(self) -> Iterator[int]:
        """Yield the reading end of a pipe that contains the secret, for a child that is started in the block."""
        reading, writing = os.pipe()
        try:
            with os.fdopen(writing, "w") as file:
                file.write(self._text)
            yield reading
        finally:
            os.close(reading)


def read_file(path: Path, *, setting: str) -> Secret:
    """Return the secret in the file `path`, which `setting` names.

    Raises `ConfigError` if it cannot be read, holds no valid secret, or others could read or replace it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{setting} = {str(path)!r} cannot be read ({error.strerror}); bring the file from the manager's machine, "
            f"or set {VARIABLE}"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{setting} = {str(path)!r} is no regular file")
    if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{setting} = {str(path)!r} is open to others (mode {stat.S_IMODE(status.st_mode):04o}): the secret in it "
            f"may be known; make a new one, and keep it by: chmod 600 {path}"
        )
    try:
        return Secret(content.decode().strip(), origin=f"{setting} = {str(path)!r}")
    except UnicodeDecodeError:
        raise ConfigError(f"{setting} = {str(path)!r} holds no secret, but other bytes") from None


_held: list[Secret] = []
"""At most one: the secret of this process's launcher, or of this process if it is the launcher."""


def hold(secret: Secret) -> Secret:
    """Have this process, which belongs to one run, use `secret` from now on without looking for it."""
    _held[:] = [secret]
    return secret


def given(config: Config | None) -> Secret | None:
    """Return the secret from this process's launcher, its environment, or the configured file; None if there is none.

    Raises `ConfigError` as `read_file` does."""
    if (descriptor := os.environ.pop(DESCRIPTOR, None)) is not None:
        with os.fdopen(int(descriptor), "rb") as pipe:
            return hold(Secret(pipe.read(_MOST_BYTES).decode(), origin="the launcher's pipe"))
    if _held:
        return _held[0]
    if text := os.environ.get(VARIABLE, "").strip():
        return Secret(text, origin=f"the environment variable {VARIABLE}")
    if config is not None and config.security.secret_file:
        return read_file(Path(config.security.secret_file).expanduser(), setting="security.secret_file")
    return None


def _is_to_be_made(config: Config) -> bool:
    """Whether the secret belongs in the file `security.secret_file`, which the manager has not made yet."""
    file = config.security.secret_file
    goes_before = DESCRIPTOR in os.environ or _held or os.environ.get(VARIABLE, "").strip()
    return bool(file) and not goes_before and not Path(file).expanduser().exists()


def of_new_run(config: Config) -> Secret:
    """Return the secret of a run that this process begins: a given one, or else a new one. A new one is written to
    `security.secret_file` if that names a missing file. Raises `ConfigError` as `read_file` does."""
    if _is_to_be_made(config):
        file = config.security.secret_file
        try:
            Secret.make().write(Path(file).expanduser())
        except OSError as error:
            raise ConfigError(f"security.secret_file = {file!r} cannot be written ({error.strerror})") from error
    return given(config) or Secret.make()


def of_run_at(url: str, config: Config | None = None) -> Secret | None:
    """Return the secret of the run with the manager at `url`; None if this process cannot find it.

    Raises `ConfigError` as `read_file` does."""
    found = given(config)
    if found is not None:
        return found
    path = _file_of(url)
    return read_file(path, setting="the secret of that run") if path.exists() else None


def await_secret(url: str, config: Config) -> None:
    """Wait for the secret of the run with the manager at `url`: a process that is started by hand may be first.

    Return when the secret is known, when that manager listens and has not written it, or at the latest after
    `limits.start_seconds`. Raises `ConfigError` as `read_file` does."""
    given_up_at = time.monotonic() + config.limits.start_seconds
    parts = urlsplit(url)
    warned = False
    while (_is_to_be_made(config) or given(config) is None) and time.monotonic() < given_up_at:
        try:
            socket.create_connection((parts.hostname or "", parts.port or 80), timeout=LOOK_SECONDS).close()
        except OSError as error:  # a secret in the cache now would be from an earlier manager that was killed
            if not warned:
                log.warning("waiting for the manager at %s (is it running there?): %s", url, error.strerror or error)
            warned = True
        else:  # the manager makes the secret's file before it listens, and writes the copy in the cache when it does
            if not _is_to_be_made(config) and of_run_at(url, config) is not None:
                return
            given_up_at = min(given_up_at, time.monotonic() + LEAVING_SECONDS)
        time.sleep(LOOK_SECONDS)


@contextmanager
def left_for(url: str, secret: Secret) -> Iterator[Path | None]:
    """While the manager is at `url`, keep its secret in a file for processes that this user starts by hand here.

    Yield the file's path; None if it cannot be written.
    """
    path = _file_of(url)
    try:
        secret.write(path)
    except OSError:
        yield None
        return
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def encrypts(config: Config, host: str) -> bool:
    """Whether a server of the run that listens at `host` accepts only encrypted connections."""
    wanted = config.security.encryption
    return wanted == "on" or (wanted == "auto" and not is_loopback(host))


def _file_of(url: str) -> Path:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host):  # on another machine with the same home folder it would be another manager
        host = f"{socket.gethostname()}-{host}"
    name = re.sub(r"[^\w.]+", "-", f"{host}-{parts.port}")
    return cache_home() / "secrets" / name
