"""The overview as one file."""

from __future__ import annotations

import re
from pathlib import Path

from streamrl.page.bundle import ENTRY, bundled, write_overview
from streamrl.page.server import STATIC, static_files
from tests.page.made_up import HOSTILE, made_up_run


def test_every_module_is_in_the_script_once_and_none_is_imported() -> None:
    script = bundled(ENTRY)
    modules = [name for name in static_files() if name.endswith(".js") and not name.startswith("vendor/")]
    for name in modules:
        assert script.count(f"const module_{re.sub(r'[/.]', '_', name.removesuffix('.js'))} =") == 1
    assert not re.search(r"^\s*(import|export)\b", script, re.MULTILINE)
    assert "</script" not in script


def test_the_file_needs_nothing_else_and_text_in_it_stays_text(tmp_path: Path) -> None:
    folder = made_up_run(tmp_path / "run", hostile=True)
    (folder / "config.toml").write_text(f"[model]\npath = '''{HOSTILE.replace(chr(0), '').replace(chr(27), '')}'''\n")
    text = write_overview(folder).read_text()
    assert len(re.findall(r"<script", text)) == 2  # the figures, and what draws them
    assert "<img" not in text
    assert not re.search(r"""(src|href)=["']""", text.replace('"', "'").split("<script>")[0])
    assert "http-equiv" in text
    assert len(text) < 600_000
    assert not list(folder.glob("*.unfinished"))


def test_uplot_comes_with_its_licence() -> None:
    assert "MIT License" in (STATIC / "vendor" / "uPlot.LICENSE").read_text()
