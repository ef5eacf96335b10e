"""Keys that users set, how keys are shown, and those of gservers."""

from __future__ import annotations

import pytest

from streamrl.config import from_dict
from streamrl.errors import ConfigError
from streamrl.transport.credentials import GserverKeys, admits, read_key
from streamrl.transport.secret import Secret

KEY = "0123456789abcdef-key"
VARIABLE = "TEST_MANAGER_KEY"


def test_a_key_that_is_not_set_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_key("", setting="gserver.api_key_env") == ""
    for wrong in (None, "", "short", "with spaces 0123456789", "ü" * 20):
        if wrong is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ConfigError, match=f'gserver.api_key_env = "{VARIABLE}"') as error:
            read_key(VARIABLE, setting="gserver.api_key_env")
        assert not wrong or wrong not in str(error.value)
    monkeypatch.setenv(VARIABLE, f"{KEY}\n")
    assert read_key(VARIABLE, setting="gserver.api_key_env") == KEY


def test_only_the_whole_key_admits() -> None:
    assert admits("", None)
    assert admits(KEY, f"Bearer {KEY}")
    for shown in (None, "", KEY, f"Bearer {KEY}x", f"bearer {KEY}", f"Bearer {KEY[:-1]}", "Bearer ü", "Bearer \udcff"):
        assert not admits(KEY, shown)


def test_a_gserver_is_controlled_by_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for servers that somebody else started, which have one key for everything."""
    secret, config = Secret.make(), from_dict({})
    first, second = (GserverKeys.of(config, secret, index) for index in (0, 1))
    assert first.generation == second.generation
    assert len({first.generation, first.control, second.control, secret.shown}) == 4
    monkeypatch.setenv(VARIABLE, KEY)
    joined = from_dict({"gserver": {"api_key_env": VARIABLE}})
    assert GserverKeys.of(joined, secret, 0) == (KEY, KEY)
