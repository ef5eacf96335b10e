"""A release: its version is the same everywhere, and what pip installs runs without the repository and a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from streamrl import __version__, example_files

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(file.name for file in (ROOT / "examples").iterdir() if file.suffix in (".toml", ".py"))
SECTIONS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
"""Of a version, at https://keepachangelog.com."""


def test_the_changelog_and_the_citation_have_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", changelog, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    version, _, date = versions[1].partition(" - ")
    assert version == f"[{__version__}]"
    assert set(re.findall(r"^### (.+)$", changelog, re.MULTILINE)) <= SECTIONS
    citation = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {__version__}" in citation
    assert f"date-released: {date}" in citation


def test_a_wheel_made_from_the_sdist_runs_an_example_without_a_compiler(tmp_path: Path) -> None:
    source, here = tmp_path / "source", tmp_path / "empty"
    for folder in (source, here):
        folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("streamrl", "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-c", f"from setuptools import build_meta as b; b.build_sdist({str(tmp_path)!r})", cwd=source)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    offline = ("--no-deps", "--no-index")
    sdist = tmp_path / f"streamrl-{__version__}.tar.gz"
    run(*pip, "wheel", *offline, "--no-build-isolation", "-w", str(tmp_path), str(sdist), cwd=here)
    programs = environment(tmp_path / "installed")
    wheel = tmp_path / f"streamrl-{__version__}-py3-none-any.whl"
    run(*pip, "--python", str(programs / "python"), "install", *offline, "--no-compile", str(wheel), cwd=here)

    installed = Path(run(str(programs / "python"), "-c", "import streamrl; print(streamrl.__file__)", cwd=here)).parent
    assert installed.is_relative_to(tmp_path)
    assert sorted(file.name for file in (installed / "examples").iterdir() if file.is_file()) == EXAMPLES
    assert (installed / "examples" / "hooks" / "loss.py").exists()

    def streamrl(*words: str) -> str:
        return run(str(programs / "streamrl"), *words, cwd=here, PATH=str(programs), **settings)

    settings = {"COLUMNS": "120", "STREAMRL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    assert streamrl("--version") == f"streamrl {__version__}\n"
    listed = streamrl("examples")
    assert all(name in listed for name in example_files.described())
    assert list(here.iterdir()) == []
    assert "streamrl run examples/guess_number.toml" in streamrl("examples", "guess_number")
    checked = streamrl("check", "examples/guess_number.toml")
    assert "✓ the agent's function examples.guess_number:play was imported" in checked
    assert "examples/guess_number.toml is valid" in checked
    streamrl("examples", "copy_scratch")
    streamrl("run", "examples/copy_scratch.toml", "run.total_train_steps=2", "run.stop_at_reward=0")
    assert (here / "runs" / "copy_scratch" / "summary.json").exists()
    assert not list((tmp_path / "cache").rglob("*.so"))


def environment(folder: Path) -> Path:
    """Make an environment with the dependencies of streamrl and without streamrl; return its folder of programs."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


def run(*command: str, cwd: Path, **variables: str) -> str:
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC")}
    done = subprocess.run(command, cwd=cwd, env=known | variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
