"""Keys for HTTP, which travel as `Authorization: Bearer KEY`: those of gservers, and those that users set.

A configuration names only the environment variable that holds a key, so that no key is in a file, a log or a
fingerprint.
"""

from __future__ import annotations

import hmac
import os
from typing import NamedTuple

from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.transport.secret import Secret

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


def generation_key(config: Config, secret: Secret) -> str:
    """Return the key that the run's gservers ask those for who want them to generate: that of `gserver.api_key_env`, or
    one that is made for the run. Raises as `read_key` does."""
    if config.gserver.api_key_env:
        return read_key(config.gserver.api_key_env, setting="gserver.api_key_env")
    return secret.key("generation").hex()


def control_key(config: Config, secret: Secret, index: int) -> str:
    """Return the key that gserver `index` asks for before it lets anybody change it, which the manager alone does."""
    if config.gserver.api_key_env:
        return read_key(config.gserver.api_key_env, setting="gserver.api_key_env")
    return secret.key(f"control of gserver/{index}").hex()


class GserverKeys(NamedTuple):
    """What one gserver asks its callers for; empty: nothing."""

    generation: str = ""
    """Key for generation requests and status: rollout workers have it."""
    control: str = ""
    """Key of those who change it: the manager."""

    @classmethod
    def of(cls, config: Config, secret: Secret, index: int) -> GserverKeys:
        """Return those of gserver `index`. Raises as `read_key` does."""
        return cls(generation_key(config, secret), control_key(config, secret, index))


GENERATION_CALLS = frozenset(
    (
        "/generate",
        "/health_generate",
        "/model_info",
        "/get_model_info",
        "/server_info",
        "/get_server_info",
        "/v1/models",
    )
)
"""Paths for which the generation key is enough; for /health there is none, and all others change the gserver."""


def bearer(key: str) -> dict[str, str]:
    """Return the HTTP headers that show `key`: none for an empty key."""
    return {HEADER: f"Bearer {key}"} if key else {}


def admits(key: str, shown: str | None) -> bool:
    """Whether the value of the header, `shown`, has `key`. How long the comparison takes does not tell where they
    differ."""
    return not key or hmac.compare_digest((shown or "").encode(errors="replace"), f"Bearer {key}".encode())
