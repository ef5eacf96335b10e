"""The run's one secret: where it comes from, where it is kept, and what is derived from it.

Whoever knows it owns the run. The manager makes it, or reads it; every other process shows what is derived from it
once, when it joins, and is given what its role needs (`RegisterReply`). A process looks for it here, in this order:

1. the pipe by which the launcher that started it hands it on;
2. the environment variable `STREAMRL_SECRET`;
3. the file that `security.secret_file` names, which nobody but its owner may be able to read;
4. the file of the same kind in which the manager at that URL left it in this user's cache, for whoever joins from the
   same machine by hand.

Invariant: it is in no command line, log, error, or run folder, and code of the user's is not started with it.
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
from streamrl.errors import ConfigError
from streamrl.local_cache import cache_home
from streamrl.transport.addresses import is_loopback

VARIABLE = "STREAMRL_SECRET"
"""Environment variable: the secret itself."""
DESCRIPTOR = "STREAMRL_SECRET_FD"
"""Environment variable: file descriptor of the pipe by which a launcher hands the secret on."""
LEAST_CHARACTERS = 16
LOOK_SECONDS = 0.2
"""Between two looks for a manager that is not there yet."""
LEAVING_SECONDS = 2.0
"""In which a manager that listens has left its secret, if it leaves it here."""
_MOST_BYTES = 4096

log = logging.getLogger(__name__)


class Secret:
    """A secret, which does not show in what is printed of it."""

    __slots__ = ("_text",)

    def __init__(self, text: str, *, origin: str) -> None:
        """`origin` names where it comes from. Raises `ConfigError` for one that is too short, or has blanks in it."""
        if len(text) < LEAST_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError(
                f"{origin} holds no secret (at least {LEAST_CHARACTERS} printable characters without spaces); "
                "make one with: openssl rand -hex 32"
            )
        self._text = text

    def __repr__(self) -> str:
        return "Secret(…)"

    @classmethod
    def make(cls) -> Secret:
        """Return a new one, of 256 random bits."""
        return cls(secrets.token_hex(32), origin="a new secret")

    def key(self, purpose: str) -> bytes:
        """Return the key of 32 bytes for one purpose, which tells nothing of the secret or of other keys (HMAC-SHA256,
        RFC 2104)."""
        return hmac.digest(self._text.encode(), f"streamrl {purpose}".encode(), "sha256")

    @property
    def shown(self) -> str:
        """What a process shows the manager: the secret itself never travels."""
        return self.key("shown").hex()

    @property
    def revealed(self) -> str:
        """The secret itself, for a launcher that hands it on where no pipe leads."""
        return self._text

    def write(self, path: Path) -> None:
        """Leave it in a file that only its owner can read. Raises `OSError`."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{self._text}\n")
        new.replace(path)

    @contextmanager
    def handed_on(self) -> Iterator[int]:
        """The reading end of a pipe with the secret in it, to be inherited by a child that is started meanwhile."""
        reading, writing = os.pipe()
        try:
            with os.fdopen(writing, "w") as file:
                file.write(self._text)
            yield reading
        finally:
            os.close(reading)


def read_file(path: Path, *, setting: str) -> Secret:
    """Return the secret in the file `path`, which `setting` names.

    Raises `ConfigError` when it cannot be read, holds no secret, or could be read or replaced by others.
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
"""At most one: that of the launcher that started this process, or that this process is."""


def hold(secret: Secret) -> Secret:
    """From now on this process, which belongs to one run, knows `secret` without looking for it."""
    _held[:] = [secret]
    return secret


def given(config: Config | None) -> Secret | None:
    """Return the secret that this process was given by its launcher, its environment, or the file that the
    configuration names; None if it was given none. Raises `ConfigError` as `read_file` does."""
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
    """Whether the secret is to be in the file that `security.secret_file` names, which the manager has not made yet."""
    file = config.security.secret_file
    goes_before = DESCRIPTOR in os.environ or _held or os.environ.get(VARIABLE, "").strip()
    return bool(file) and not goes_before and not Path(file).expanduser().exists()


def of_new_run(config: Config) -> Secret:
    """Return the secret of a run that this process begins: the one that it was given, or a new one, which is left in
    `security.secret_file` if that names a file that is not there yet. Raises `ConfigError` as `read_file` does."""
    if _is_to_be_made(config):
        file = config.security.secret_file
        try:
            Secret.make().write(Path(file).expanduser())
        except OSError as error:
            raise ConfigError(f"security.secret_file = {file!r} cannot be written ({error.strerror})") from error
    return given(config) or Secret.make()


def of_run_at(url: str, config: Config | None = None) -> Secret | None:
    """Return the secret of the run whose manager is at `url`, as far as this process can know it: None if it cannot."""
    found = given(config)
    if found is not None:
        return found
    path = _file_of(url)
    return read_file(path, setting="the secret of that run") if path.exists() else None


def await_secret(url: str, config: Config) -> None:
    """Look for the secret of the run whose manager is at `url` until it is known, or that manager is there and has not
    left it: a process that is started by hand may be there first. Returns after `manager.join_timeout_seconds` at the
    latest. Raises `ConfigError` as `read_file` does."""
    given_up_at = time.monotonic() + config.manager.join_timeout_seconds
    parts = urlsplit(url)
    warned = False
    while (_is_to_be_made(config) or given(config) is None) and time.monotonic() < given_up_at:
        try:
            socket.create_connection((parts.hostname or "", parts.port or 80), timeout=LOOK_SECONDS).close()
        except OSError as error:  # what lies in the cache is of a manager before, that was killed
            if not warned:
                log.warning("waiting for the manager at %s (is it running there?): %s", url, error.strerror or error)
            warned = True
        else:  # it leaves its secret when it listens, and has made the file before
            if not _is_to_be_made(config) and of_run_at(url, config) is not None:
                return
            given_up_at = min(given_up_at, time.monotonic() + LEAVING_SECONDS)
        time.sleep(LOOK_SECONDS)


@contextmanager
def left_for(url: str, secret: Secret) -> Iterator[Path | None]:
    """While the manager is at `url`, leave its secret for those who join from this machine, as this user, by hand.

    Yields where it is; None if that cannot be.
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
    """Whether a server of the run that listens at `host` takes encrypted connections alone."""
    wanted = config.security.encryption
    return wanted == "on" or (wanted == "auto" and not is_loopback(host))


def _file_of(url: str) -> Path:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host):  # another machine's with the same home is another manager's
        host = f"{socket.gethostname()}-{host}"
    name = re.sub(r"[^\w.]+", "-", f"{host}-{parts.port}")
    return cache_home() / "secrets" / name
