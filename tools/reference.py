"""Write docs/reference/: the settings and the commands, from the code that defines them.

python tools/reference.py            # write the pages
python tools/reference.py --check    # exit 1 if a page is not as the code defines it
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from streamrl.config import Config, Section  # noqa: E402

PAGES = ROOT / "docs" / "reference"
LARGEST = sys.float_info.max


def main() -> None:
    """Write the pages, or compare them with the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    check = parser.parse_args().check
    stale = []
    for name, page in {"config.md": settings, "cli.md": commands}.items():
        file, text = PAGES / name, page()
        if check and (not file.exists() or file.read_text() != text):
            stale.append(str(file.relative_to(ROOT)))
        elif not check:
            PAGES.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    if stale:
        raise SystemExit(f"not as the code defines them: {', '.join(stale)}; run `python tools/reference.py`")


# --- settings ------------------------------------------------------------------------------------


def settings() -> str:
    """Return the page of all settings: one table for each section of the configuration file."""
    sections = list(sections_of(Config))
    keys = sum(len(leaves(section)) for _, section in sections)
    lines = [
        "# Settings",
        "",
        f"The configuration is one TOML file with {len(sections)} sections and {keys} settings, all of them optional. "
        "Every setting can be replaced on the command line: `streamrl run CONFIG trainer.lr=1e-5`. "
        "`streamrl check --all CONFIG` prints the values that hold for a file.",
        "",
    ]
    for name, section in sections:
        lines += [f"## [{name}]", "", prose(inspect.getdoc(section) or ""), ""]
        found = leaves(section)
        if found:
            lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
            lines += [f"| `{name}.{row[0]}` | {' | '.join(row[1:])} |" for row in found]
            lines.append("")
    return "\n".join(lines)


def sections_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield each section below `section` with its name in the file, outer ones first."""
    for field in msgspec.structs.fields(section):
        inner = section_in(field.type)
        if inner is not None:
            name = prefix + field.encode_name
            yield name, inner
            yield from sections_of(inner, f"{name}.")


def section_in(kind: Any) -> type[Section] | None:
    """Return the section that a field of type `kind` holds; None if it holds a value."""
    if inspect.isclass(kind) and issubclass(kind, Section):
        return kind
    if get_origin(kind) in (Union, types.UnionType, list):
        return next((inner for inner in map(section_in, get_args(kind)) if inner is not None), None)
    return None


def leaves(section: type[Section]) -> list[tuple[str, str, str, str]]:
    """Return name, type, default and meaning of each setting of a section."""
    texts = attribute_docs(section)
    return [
        (field.encode_name, cell(kind_of(field.type)), cell(default_of(field)), cell(prose(texts.get(field.name, ""))))
        for field in msgspec.structs.fields(section)
        if section_in(field.type) is None
    ]


def attribute_docs(section: type[Section]) -> dict[str, str]:
    """Return the docstring below each attribute of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if not issubclass(base, Section) or base is Section:
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for attribute, below in zip(node.body, node.body[1:], strict=False):
            if not (isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name)):
                continue
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[attribute.target.id] = inspect.cleandoc(str(below.value.value))
    return found


def kind_of(kind: Any) -> str:
    """Describe the values of a type in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return kind_of(args[0]) + limits(args[1])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(kind_of(arg) for arg in args if arg is not types.NoneType)
    if origin is list:
        return f"list of {kind_of(args[0])}"
    if origin is dict or kind is dict:
        return "table"
    names = {int: "integer", float: "number", bool: "`true`, `false`", str: "text"}
    return names.get(kind, "value" if kind is Any else getattr(kind, "__name__", str(kind)))


def limits(meta: msgspec.Meta) -> str:
    """Describe the bounds of a number."""
    parts = [
        f"{sign} {bound:g}"
        for sign, bound in ((">", meta.gt), ("≥", meta.ge), ("<", meta.lt), ("≤", meta.le))
        if bound is not None and abs(bound) != LARGEST
    ]
    return f" {', '.join(parts)}" if parts else ""


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """Return the default as it would be written in the file; a dash for none."""
    value = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    if value is None or value is msgspec.NODEFAULT:
        return "–"
    return f"`{msgspec.json.encode(msgspec.to_builtins(value)).decode()}`"


# --- commands ------------------------------------------------------------------------------------


def commands() -> str:
    """Return the page of all commands: usage, arguments and options of each."""
    import typer

    from streamrl.cli import app

    lines = ["# Commands", "", "`streamrl COMMAND --help` prints the same.", ""]
    for name, command in visible(typer.main.get_command(app)):
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(piece for piece in command.collect_usage_pieces(context))
        lines += [f"## streamrl {name}", "", f"`streamrl {name} {usage}`", "", prose(command.help or ""), ""]
        rows = [row for row in map(option_row, command.params) if row]
        if rows:
            lines += ["| argument or option | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def visible(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full name and each command of a group and of the groups in it, without hidden ones."""
    for name, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from visible(command, f"{prefix}{name} ")
        elif not command.hidden:
            yield prefix + name, command


def option_row(parameter: Any) -> str:
    """Return the table row of a parameter; empty if it is hidden."""
    if getattr(parameter, "hidden", False):
        return ""
    names = ", ".join((*parameter.opts, *parameter.secondary_opts))
    shown = parameter.metavar or parameter.name.upper() if parameter.param_type_name == "argument" else names
    value = parameter.default
    default = "–" if value in (None, False, "", ()) or callable(value) else f"`{value}`"
    return f"| `{shown}` | {default} | {cell(prose(getattr(parameter, 'help', '') or ''))} |"


def prose(text: str) -> str:
    """Return the lines of `text` joined, paragraph by paragraph, with pages of docs/ as links."""
    joined = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](../\1.md)", joined)


def cell(text: str) -> str:
    """Return `text` for a cell of a table."""
    return text.replace("\n\n", " ").replace("|", "\\|")


if __name__ == "__main__":
    main()
