"""The settings that every process of the run must have as the manager has them."""

from __future__ import annotations

from streamrl.config import Config
from streamrl.config.sharing import differences
from streamrl.errors import ConfigError
from streamrl.transport.control import AskPlace, Register


class SharedConfiguration:
    """The manager's own."""

    def __init__(self, config: Config) -> None:
        self._digest = config.digest()
        self._changes = config.shared_changes()
        self._defaults = Config().shared()

    def check(self, message: Register | AskPlace, *, who: str) -> None:
        """Raise `ConfigError`, which names the settings that differ, unless `who` sends `message` with the same."""
        if message.config_digest == self._digest:
            return
        found = differences(message.settings, self._changes, defaults=self._defaults)
        raise ConfigError(
            f"{who} has another configuration than the manager: {found or 'is it another version of streamrl?'} "
            f"(fingerprints {message.config_digest} and {self._digest}); start all processes of a run with the same "
            "file and the same overrides; hosts, ports, paths, counts and the sections [run] and [manager] may differ"
        )
