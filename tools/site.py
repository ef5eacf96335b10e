"""Hooks of mkdocs: the README is the first page, and pages may show plots of benchmarks/results/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add the README as index.md, and the plots of benchmarks/results/ as results/."""
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=re.sub(r"(\(|\")docs/", r"\1", readme)))
    for plot in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links that leave docs/ to their copies in the site."""
    return markdown.replace("](../README.md", "](index.md").replace("../benchmarks/results/", "results/")
