"""API keys: shared secrets that the manager and the gservers may ask their callers for.

A configuration names only the environment variable that holds a key, so that no key is in a file, a log or a
fingerprint. A key travels as `Authorization: Bearer KEY`.
"""

from __future__ import annotations

import hmac
import ipaddress
import os

from streamrl.config import Config
from streamrl.errors import ConfigError

HEADER = "Authorization"
LEAST_CHARACTERS = 16


def read_key(variable: str, *, setting: str) -> str:
    """Return the key in the environment variable `variable`, which `setting` names; an empty key if it names none.

    Raises `ConfigError` when the variable holds no key.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if len(key) < LEAST_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f'{setting} = "{variable}": that environment variable holds no key '
            f"(at least {LEAST_CHARACTERS} printable characters without spaces); "
            f'set it in every process of the run, for example export {variable}="$(openssl rand -hex 32)"'
        )
    return key


def manager_key(config: Config) -> str:
    """Return the key that callers of the manager show; empty if it asks for none. Raises as `read_key` does."""
    return read_key(config.manager.api_key_env, setting="manager.api_key_env")


def gserver_key(config: Config) -> str:
    """Return the key that callers of the gservers show; empty if they ask for none. Raises as `read_key` does."""
    return read_key(config.gserver.api_key_env, setting="gserver.api_key_env")


def bearer(key: str) -> dict[str, str]:
    """Return the HTTP headers that show `key`: none for an empty key."""
    return {HEADER: f"Bearer {key}"} if key else {}


def admits(key: str, shown: str | None) -> bool:
    """Whether the value of the header, `shown`, has `key`. How long the comparison takes does not tell where they
    differ."""
    return not key or hmac.compare_digest((shown or "").encode(), f"Bearer {key}".encode())


def refusal(setting: str, variable: str) -> str:
    """Return what a caller without the right key is told."""
    return (
        f"this call needs the key that {setting} names: set the environment variable {variable} to the key of the "
        "run where this call comes from (header Authorization: Bearer KEY)"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens at `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
