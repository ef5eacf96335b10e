"""The examples that come with streamrl: listed, copied, and hinted at."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl import config, example_files
from streamrl.errors import ConfigError

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(file.name for file in (ROOT / "examples").iterdir() if file.suffix in (".toml", ".py"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_every_example_is_described_in_one_sentence() -> None:
    described = example_files.described()
    assert [f"{name}.toml" for name in described] == [name for name in EXAMPLES if name.endswith(".toml")]
    assert all(20 < len(sentence) < 160 for sentence in described.values())
    assert described["chain_sum"] == "SmolLM2-135M-Instruct on chain_sum of reasoning-gym"


@pytest.mark.parametrize("name", example_files.described())
def test_a_copy_has_all_that_its_configuration_names(here: Path, name: str) -> None:
    files = example_files.copied(name)
    assert files[0] == Path("examples", f"{name}.toml")
    assert sorted(files) == sorted(file.relative_to(here) for file in here.rglob("*") if file.is_file())
    for file in files:
        assert file.read_bytes() == (ROOT / file).read_bytes()
    loaded = config.load(files[0])
    for spec in (loaded.data.path, loaded.rollout.agent.function, loaded.rollout.reward.function, loaded.trainer.graph):
        module, colon, _ = spec.partition(":")
        if colon and module.startswith("examples."):
            assert Path(*module.split(".")).with_suffix(".py") in files


def test_a_file_that_was_changed_is_not_replaced(here: Path) -> None:
    toml, module = example_files.copied("guess_number")
    assert example_files.copied("examples/guess_number.toml") == [toml, module]
    module.write_text("mine")
    toml.unlink()
    with pytest.raises(ConfigError, match=r"examples/guess_number\.py exists with other content and is not replaced"):
        example_files.copied("guess_number")
    assert module.read_text() == "mine"
    assert not toml.exists()


@pytest.mark.parametrize("asked", ["examples/chain_sum.toml", "chain_sum.toml", "chain_sum"])
def test_a_missing_configuration_with_the_name_of_an_example_is_hinted_at(here: Path, asked: str) -> None:
    with pytest.raises(ConfigError, match="`streamrl examples chain_sum` copies the example of this name") as raised:
        config.load(asked)
    assert "path right" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"mine\.toml: cannot be read \(No such file or directory\); is the path"):
        config.load("mine.toml")
    assert list(here.iterdir()) == []
