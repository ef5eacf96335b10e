"""The project's texts are in plain English: turns of phrase that make them hard to read stay rare."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "tools" / "prose.py"
spec = importlib.util.spec_from_file_location("prose", FILE)
assert spec is not None
assert spec.loader is not None
prose = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prose)


@pytest.mark.parametrize("part", prose.PARTS)
def test_turns_of_phrase_stay_below_their_aims(part: str) -> None:
    words, counts = prose.counted(prose.PARTS[part])
    assert words > 500
    assert prose.above(words, counts) == {}, f"python tools/prose.py --list {' '.join(prose.PARTS[part])}"


def test_the_counter_reads_texts_and_not_code(tmp_path: Path) -> None:
    texts = {
        "a.py": '"""What is told."""\nsaid = "say"\nlog(f"{said} goes on")  # besides\n',
        "a.js": 'const told = "say"; // who\nlog("the server answers");\n',
        "a.md": "`told` anew\n```\nsaid\n```\n",
        "a.toml": "told = 1  # of which\n",
    }
    found = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        passages = prose.passages(tmp_path / name)
        found[name] = sorted((line, kind) for line, text in passages for kind, _ in prose.occurrences(text))
    assert found == {
        "a.py": [(1, "tell"), (1, "what is …"), (3, "besides"), (3, "go on")],
        "a.js": [(1, "who, nobody"), (2, "a program that answers")],
        "a.md": [(1, "anew, meanwhile")],
        "a.toml": [(1, "of which")],
    }
    counts = prose.Counter({"say": 5, "tell": 1})
    assert prose.above(10_000, counts) == {"say": 5}
    assert prose.above(20_000, counts) == prose.above(100, prose.Counter({"tell": 1})) == {}
