"""Wheels in parts: another machine installs them without network, and notices a part that is missing or damaged."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNEL = "parcel/sm100/kernel.so"


def make_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    info = f"{name}-1.0.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
        wheel.writestr(f"{info}/RECORD", record)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    wheels = folder / "index"
    wheels.mkdir()
    payload = os.urandom(5 * 2**19)
    make_wheel(wheels, "parcel", {"parcel/__init__.py": b"VALUE = 7\n", "parcel/data": payload, KERNEL: b"x" * 2**20})
    make_wheel(wheels, "other", {"other.py": b"VALUE = 8\n"})
    (folder / "freeze.txt").write_text("Other==1.0\n")
    done = subprocess.run(
        [
            sys.executable, "tools/bundle.py", str(folder / "out"), "--no-resolve", "--requirement", "parcel==1.0",
            "--requirement", "other==1.0", "--installed", str(folder / "freeze.txt"), "--part-mib", "1",
            "--drop", "parcel:*/sm100/*"
        ],
        cwd=ROOT,
        env=os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 packages; 1 are installed there" in done.stdout
    return folder / "out"


def install(bundle: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(bundle / "install.py"), "--target", str(target)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=bundle)


def test_parts_are_small_and_install_without_network(bundle, tmp_path):
    parts = sorted(bundle.glob("part-*"))
    assert len(parts) == 3
    assert max(part.stat().st_size for part in parts) <= 2**20
    done = install(bundle, tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "parcel" / "__init__.py").exists()
    assert not (tmp_path / KERNEL).exists()
    assert not (tmp_path / "other.py").exists()
    listed = [row[0] for row in csv.reader((tmp_path / "parcel-1.0.dist-info" / "RECORD").open())]
    assert "parcel/data" in listed
    assert KERNEL not in listed


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_missing_or_damaged_part_is_named(bundle, tmp_path, damage):
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in bundle.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    part = copy / "part-001"
    part.unlink() if damage == "missing" else part.write_bytes(part.read_bytes()[:-1] + b"!")
    done = install(copy, tmp_path / "target")
    assert done.returncode == 1
    assert f"part-001 is {damage}" in done.stderr


def test_a_folder_with_files_is_refused(bundle):
    done = subprocess.run([sys.executable, "tools/bundle.py", str(bundle)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "is not empty" in done.stderr
