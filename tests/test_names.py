"""Names of classes: nouns of the field, and each for one class."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent / "streamrl"
VAGUE = {"Part", "Piece", "Place", "Places", "Door", "Doorkeeper", "Fate", "Seldom", "Stranger"}
PARTICIPLES = {"Begun", "Found", "Given", "Held", "Kept", "Known", "Made", "Sent", "Shown", "Told"}
NOUNS = {"Embed", "Feed", "Need", "Seed", "Speed"}
AS_IN_SGLANG = {"UpdateWeightsFromDistributed"}
"""Requests that have the name of an endpoint of SGLang's."""


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for file in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                yield file.relative_to(ROOT).as_posix(), node


def is_error(node: ast.ClassDef) -> bool:
    """Whether the class is an exception, such as `DeadlineExceeded`."""
    bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
    return any(re.search(r"(Error|Exception|Died|Failed|Refused)$", base) for base in bases)


def is_bad(name: str) -> bool:
    """Whether `name` is a vague word or ends with a participle."""
    bare = name.lstrip("_")
    last = (re.findall(r"[A-Z][a-z0-9]*", bare) or [bare])[-1]
    return bare in VAGUE or last in PARTICIPLES or (last.endswith("ed") and last not in NOUNS)


def test_no_two_classes_have_one_name() -> None:
    found = Counter(node.name for _, node in classes())
    assert [name for name, count in found.items() if count > 1] == []


def test_classes_are_named_by_nouns() -> None:
    assert [is_bad(name) for name in ("Told", "_Joined", "WeightsShown", "Part", "Seed", "PartOnDisk")] == [
        *(True, True, True, True, False, False)
    ]
    found = [
        f"{file}: {node.name}"
        for file, node in classes()
        if is_bad(node.name) and not is_error(node) and node.name not in AS_IN_SGLANG
    ]
    assert found == []
