"""The documentation as a site: it builds without a dead link, and the reference is as the code defines it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_reference_is_as_the_code_defines_it():
    done = run("tools/reference.py", "--check")
    assert done.returncode == 0, done.stderr


def test_the_reference_has_the_commands_of_groups():
    assert "`streamrl launch slurm [OPTIONS]" in (ROOT / "docs/reference/cli.md").read_text()


def test_every_setting_has_a_meaning():
    """A row of docs/reference/config.md ends with an empty cell if its setting has no docstring."""
    rows = re.findall(r"^\| `([\w.]+)` \|.*\|([^|]*)\|$", (ROOT / "docs/reference/config.md").read_text(), re.MULTILINE)
    assert len(rows) > 100
    assert [name for name, meaning in rows if not meaning.strip()] == []


def test_the_site_builds_without_a_warning(tmp_path):
    done = run("-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "reference" / "config" / "index.html").exists()
