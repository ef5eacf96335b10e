"""Count turns of phrase that make technical text hard to read, for each 10,000 words.

python tools/prose.py                # the project: code, documentation, examples, the page's texts
python tools/prose.py --list PATH    # each occurrence in files or folders

It reads docstrings, comments and texts (log lines, errors, help) of Python and JavaScript, and the prose of Markdown.
A count above its aim fails tests/test_prose.py; a single sentence may be right as it is.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "code": ("streamrl",),
    "documentation": ("docs", "README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"),
    "examples": ("examples",),
    "page": ("streamrl/page/static",),
}
AIMS = {
    "what is …": (r"\bwhat(?:ever)? (?:is|was|are|were|it|they|has|have|had|the|an?|comes?|there|one|each|no)\b", 10),
    "who, nobody": (r"\b(?:who|whoever|whom|whose|nobody|everybody|everyone)\b", 12),
    "tell": (r"\b(?:tells?|told|telling)\b", 3),
    "say": (r"\b(?:says?|said|saying)\b", 4),
    "of which": (r"\b(?:of which|of whom|that of|those of|of those)\b", 5),
    "go on": (r"\b(?:go|goes|going|gone|went) on\b", 3),
    "besides": (r"\bbesides?\b", 2),
    "anew, meanwhile": (r"\b(?:anew|meanwhile|thereby|nonetheless|likewise|for want of|be it)\b", 2),
    "a program that answers": (r"\b(?:it|which|server|manager|worker|process|neither) answers\b|\banswered\b", 3),
}
"""Turn of phrase → pattern, and the most occurrences for each 10,000 words."""
SCRIPT = re.compile(r"(?<!:)//([^\n]*)|/\*(.*?)\*/|\"([^\"\n]*)\"|`([^`]*)`|>([^<>{}\n]+)</", re.DOTALL)
"""Comments and strings of JavaScript, and the text of HTML elements."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", nargs="+", type=Path, metavar="PATH", help="print each occurrence in these")
    listed = parser.parse_args().list
    if listed:
        for file in files_of(listed):
            for line, text in passages(file):
                for name, found in occurrences(text):
                    print(f"{file}:{line}: [{name}] … {found} …")
        return
    for part, places in PARTS.items():
        words, counts = counted(places)
        print(f"{part}: {words} words")
        for name, (_, aim) in AIMS.items():
            print(f"  {counts[name] / words * 10_000:6.1f} of at most {aim:2d}  {name}")


def counted(places: Iterable[str]) -> tuple[int, Counter[str]]:
    """Return the number of words in files and folders of the project, and how often each turn of phrase occurs."""
    texts = [text for file in files_of(ROOT / place for place in places) for _, text in passages(file)]
    return sum(len(text.split()) for text in texts), Counter(name for text in texts for name, _ in occurrences(text))


def above(words: int, counts: Counter[str]) -> dict[str, int]:
    """Return the turns of phrase that occur more often than their aims allow. A single occurrence is no habit."""
    return {name: counts[name] for name, (_, aim) in AIMS.items() if counts[name] > max(1, words * aim / 10_000)}


def occurrences(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each turn of phrase in a text outside inline code, and the words around it."""
    text = re.sub(r"`[^`\n]*`", "x", text)
    for name, (pattern, _) in AIMS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield name, " ".join(text[max(0, match.start() - 60) : match.end() + 50].split())


def files_of(places: Iterable[Path]) -> Iterator[Path]:
    for place in places:
        if place.is_file():
            yield place
        yield from (
            file
            for file in sorted(place.rglob("*"))
            if file.suffix in READERS and not {"vendor", "__pycache__"} & set(file.parts)
        )


def passages(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the passages of a file that people read, each with the number of its first line."""
    return READERS[file.suffix](file.read_text())


def of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, comments, and all other strings that have a space, which are mostly texts for users."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def of_script(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments and the strings that have a space."""
    for match in SCRIPT.finditer(source):
        text = next(text for text in match.groups() if text is not None)
        if " " in text:
            yield source.count("\n", 0, match.start()) + 1, text


def of_toml(source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        if "#" in line:
            yield number, line.partition("#")[2]


def of_markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines outside code blocks."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


READERS = {".py": of_python, ".js": of_script, ".html": of_script, ".toml": of_toml, ".md": of_markdown}


if __name__ == "__main__":
    main()
