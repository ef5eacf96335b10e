"""The overview of a run as one self-contained HTML file.

The modules of `static/` are concatenated into one script. Each becomes a function that returns its exports, after the
modules that it imports. The figures are a block of JSON. The file's Content-Security-Policy allows only this script and
this style sheet, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
from graphlib import TopologicalSorter
from pathlib import Path

import msgspec

from streamrl.page import answers
from streamrl.page.server import STATIC
from streamrl.records.health import findings
from streamrl.records.view import RunView

OVERVIEW_FILE = "overview.html"
POINTS = 4000
"""Most rows of figures in the file; of a longer run, the least and greatest values of stretches of steps are kept."""
ENTRY = "app.js"
_IMPORT = re.compile(r'^import (\* as \w+|\{[^}]*\}) from "(\./|\.\./)([\w/.-]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def write_overview(run_dir: Path) -> Path:
    """Write the overview of the run in `run_dir` into its folder; return the file. Raises `OSError`."""
    run = RunView(run_dir)
    run.refresh()
    file = run_dir / OVERVIEW_FILE
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(overview(run))
    unfinished.replace(file)
    return file


def overview(run: RunView) -> str:
    """Return the page of `run`'s overview as HTML."""
    steps = answers.steps(run, names=[], first=float("-inf"), last=float("inf"), points=POINTS)
    kept = {
        "runs": [answers.facts(run, number=0)],
        "runs/0/steps": base64.b64encode(steps).decode(),
        "runs/0/evaluations": answers.evaluations(run),
        "runs/0/health": findings(run.figures()),
    }
    figures = msgspec.json.encode(kept).decode().replace("<", "\\u003c")  # so no tag can begin in it
    script = (STATIC / "vendor" / "uPlot.iife.min.js").read_text() + "\n" + bundled(ENTRY)
    style = (STATIC / "vendor" / "uPlot.min.css").read_text() + (STATIC / "style.css").read_text()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>streamrl</title>
<style>{style}</style>
</head>
<body>
<noscript>This page draws a run with JavaScript, which is switched off here.</noscript>
<script type="application/json" id="embedded">{figures}</script>
<script>{script}</script>
</body>
</html>
"""


def bundled(entry: str) -> str:
    """Return the module `entry` of `static/` and all its imports as one script."""
    sources: dict[str, str] = {}
    needs: dict[str, set[str]] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name not in sources:
            sources[name] = (STATIC / name).read_text()
            found = {_resolved(name, match) for match in _IMPORT.finditer(sources[name])}
            needs[name] = found
            waiting += found
    return "\n".join(_as_function(name, sources[name]) for name in TopologicalSorter(needs).static_order())


def _as_function(name: str, source: str) -> str:
    exported = _EXPORT.findall(source)
    body = _IMPORT.sub(lambda match: f"const {_bound(match)} = {_variable(_resolved(name, match))};", source)
    return f"const {_variable(name)} = (() => {{\n{_EXPORT.sub('', body)}\nreturn {{ {', '.join(exported)} }};\n}})();"


def _bound(match: re.Match[str]) -> str:
    """Return the names that an import binds, as the left side of an assignment."""
    what = match[1]
    return what.removeprefix("* as ") if what.startswith("*") else what.replace(" as ", ": ")


def _resolved(name: str, match: re.Match[str]) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), match[2], match[3]))


def _variable(name: str) -> str:
    return "module_" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
