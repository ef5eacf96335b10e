"""API keys for HTTP, sent as `Authorization: Bearer KEY`: the keys of gservers, and keys that users set.

A configuration names only the environment variable that holds a key, so that no key is in a file, a log or a
fingerprint.
"""

from __future__ import annotations

import hmac
import os
from typing import NamedTuple

from streamrl.config import Config
from streamrl.errors import ConfigError
from streamrl.transport.secret import LEAST_CHARACTERS, Secret, is_usable

HEADER = "Authorization"


def read_key(variable: str, *, setting: str) -> str:
    """Return the key in the environment variable `variable`, which `setting` names; empty if `variable` is empty.

    Raises `ConfigError` if the variable holds no valid key.
    """
    if not variable:
        return ""
    key = os.environ.get(variable, "").strip()
    if not is_usable(key):
        raise ConfigError(
            f'{setting} = "{variable}": that environment variable holds no key '
            f"(at least {LEAST_CHARACTERS} printable characters without spaces); "
            f'set it in every process of the run, for example export {variable}="$(openssl rand -hex 32)"'
        )
    return key


def generation_key(config: Config, secret: Secret) -> str:
    """Return the key that the run's gservers require for generation: from `gserver.api_key_env`, or else derived from
    the run's secret. Raises as `read_key` does."""
    return _gserver_key(config, secret, "generation")


def control_key(config: Config, secret: Secret, index: int) -> str:
    """Return the key that gserver `index` requires for calls that change it; only the manager makes such calls.

    Raises as `read_key` does."""
    return _gserver_key(config, secret, f"control of gserver/{index}")


def _gserver_key(config: Config, secret: Secret, purpose: str) -> str:
    named = read_key(config.gserver.api_key_env, setting="gserver.api_key_env")
    return named or secret.key(purpose).hex()


class GserverKeys(NamedTuple):
    """Keys that one gserver requires of its callers; an empty key admits every caller."""

    generation: str = ""
    """For generation requests and status: rollout workers have it."""
    control: str = ""
    """For calls that change the gserver: the manager has it."""

    @classmethod
    def of(cls, config: Config, secret: Secret, index: int) -> GserverKeys:
        """Return the keys of gserver `index`. Raises as `read_key` does."""
        return cls(generation_key(config, secret), control_key(config, secret, index))


def bearer(key: str) -> dict[str, str]:
    """Return the HTTP headers with `key`; no headers if it is empty."""
    return {HEADER: f"Bearer {key}"} if key else {}


def admits(key: str, shown: str | None) -> bool:
    """Whether the header value `shown` contains `key`. The comparison takes constant time."""
    return not key or hmac.compare_digest((shown or "").encode(errors="replace"), f"Bearer {key}".encode())
