"""The examples in the package: their names, their descriptions, and copies of them for users.

An example is a configuration NAME.toml and the modules that it names as `examples.MODULE`. Copies are written to the
folder `examples` of the working directory, where these names resolve to them.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from streamrl.errors import ConfigError

SOURCE = Path(__file__).with_name("examples")
COPIES = Path("examples")


def described() -> dict[str, str]:
    """Return the name of each example with the first sentence of its configuration."""
    return {file.stem: _first_sentence(file.read_text()) for file in sorted(SOURCE.glob("*.toml"))}


def copied(name: str) -> list[Path]:
    """Copy the example `name`; return its files, the configuration first.

    Existing files with the same content stay. Raises `ConfigError`, and copies nothing, for an unknown name and for an
    existing file with other content.
    """
    known = described()
    name = Path(name).stem
    if name not in known:
        near = get_close_matches(name, known, n=1) or known
        raise ConfigError(f"there is no example {name!r}; did you mean {', '.join(near)}?")
    text = (SOURCE / f"{name}.toml").read_text()
    modules = sorted(set(re.findall(r"\bexamples\.(\w+)", text)))
    contents = {COPIES / file: (SOURCE / file).read_bytes() for file in (f"{name}.toml", *(f"{m}.py" for m in modules))}
    missing = {file: content for file, content in contents.items() if not file.exists()}
    for file, content in contents.items():
        if file not in missing and file.read_bytes() != content:
            raise ConfigError(f"{file} exists with other content and is not replaced; move it away for a fresh copy")
    try:
        COPIES.mkdir(exist_ok=True)
        for file, content in missing.items():
            with file.open("xb") as copy:
                copy.write(content)
    except OSError as error:
        raise ConfigError(f"examples cannot be copied to {Path.cwd()}: {error}") from error
    return list(contents)


def hint(missing: Path) -> str:
    """Return how to get the configuration `missing` if it has the name of an example; else an empty string."""
    if not (SOURCE / f"{missing.stem}.toml").is_file():
        return ""
    return f"; `streamrl examples {missing.stem}` copies the example of this name to {COPIES / missing.stem}.toml"


def _first_sentence(text: str) -> str:
    """Return the first sentence of the comment at the beginning of a configuration."""
    comment = " ".join(line.removeprefix("#").strip() for line in re.findall(r"\A(?:#.*\n)+", text)[0].splitlines())
    return re.split(r'(?<=[.:])\s|(?<=[.]")\s', comment)[0].rstrip(".:")
