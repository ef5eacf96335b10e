"""Pack everything that a machine without network needs to run streamrl: wheels in numbered parts, and their installer.

    python tools/bundle.py OUT --python 3.12 --extras agents,rewards       # streamrl and all that it needs
    python tools/bundle.py OUT --python 3.12 --installed freeze.txt        # without the packages of that machine
    python tools/bundle.py OUT --requirements FILE --no-resolve            # exactly the packages of FILE
    python tools/bundle.py OUT --drop 'sglang_kernel:*/sm100/*'            # leave files out of a wheel

On the other machine: `python3 OUT/install.py`, or `python3 OUT/install.py --target FOLDER` and PYTHONPATH=FOLDER.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
NEWEST_GLIBC = 39
"""Newest minor version of glibc 2 for which manylinux wheels are looked for."""


def main() -> None:
    """Download the wheels for the target machine, trim them, and write the parts."""
    options = arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.out.iterdir()):
        raise SystemExit(f"{options.out} is not empty: name a folder that is, or remove its files")
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", options.python]
    for platform in platforms(options.machine, options.glibc):
        target += ["--platform", platform]
    with tempfile.TemporaryDirectory(dir=options.out.parent) as name:
        wheels = Path(name)
        requirements = list(options.requirement)
        for file in options.requirements:
            requirements += read_requirements(file)
        if not options.no_resolve:
            requirements = resolved([*requirements, own_wheel(wheels, options.extras)], target, options.installed)
        there = names_of(options.installed)
        missing = [one for one in requirements if name_of(one) not in there]
        print(f"{len(missing)} packages; {len(requirements) - len(missing)} are installed there", flush=True)
        if missing:
            pip("download", "--no-deps", "--quiet", "--dest", str(wheels), *target, *missing)
        for rule in options.drop:
            trim(wheels, rule)
        parts = write_parts(sorted(wheels.glob("*.whl")), options.out, size=options.part_mib * MIB)
    (options.out / "install.py").write_text(INSTALLER)
    total = sum(part.stat().st_size for part in parts)
    print(f"{options.out}: {len(parts)} parts, {total / MIB:.0f} MiB; there: python3 {options.out.name}/install.py")


def arguments() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the parts, which must be empty or new")
    parser.add_argument("--python", default="{}.{}".format(*sys.version_info), metavar="3.N", help="Python there")
    parser.add_argument("--machine", default="x86_64", help="architecture there, as `uname -m` prints it")
    parser.add_argument("--glibc", type=int, default=34, metavar="N", help="its glibc is 2.N (ldd --version)")
    parser.add_argument("--extras", default="", help="extras of streamrl, separated by commas")
    parser.add_argument("--installed", type=Path, metavar="FILE", help="output of `pip freeze` there")
    parser.add_argument("--requirement", action="append", default=[], metavar="NAME==VERSION", help="one more package")
    parser.add_argument("--requirements", type=Path, action="append", default=[], metavar="FILE", help="more packages")
    parser.add_argument("--no-resolve", action="store_true", help="only the named packages, without their needs")
    parser.add_argument(
        "--drop", action="append", default=[], metavar="NAME:GLOB", help="files to leave out of a wheel"
    )
    parser.add_argument("--part-mib", type=int, default=57, metavar="N", help="largest size of a part")
    options = parser.parse_args()
    options.glibc = min(options.glibc, NEWEST_GLIBC)
    return options


def pip(*arguments: str) -> str:
    """Run pip, which prints its own errors; return its output."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip {arguments[0]} failed, as printed above")
    return done.stdout


# --- packages ------------------------------------------------------------------------------------


def platforms(machine: str, glibc: int) -> list[str]:
    """Return the tags of wheels for Linux with glibc 2.`glibc`, newest first."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, 4, -1)]
    return [*tags, f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}", f"linux_{machine}"]


def own_wheel(folder: Path, extras: str) -> str:
    """Build the wheel of this repository into `folder`; return the requirement that names it."""
    pip("wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("streamrl-*.whl")
    return f"streamrl[{extras}] @ file://{wheel}" if extras else f"streamrl @ file://{wheel}"


def resolved(requirements: Sequence[str], target: Sequence[str], installed: Path | None) -> list[str]:
    """Return NAME==VERSION of all packages that `requirements` need, except streamrl itself.

    Versions are those of `installed` (a frozen list) if it is given, else those of constraints.txt.
    """
    with tempfile.TemporaryDirectory() as name:
        constraints = Path(name, "constraints.txt")
        pins = read_requirements(installed or ROOT / "constraints.txt")
        constraints.write_text("\n".join(pins) + "\n")
        report = pip(
            "install", "--dry-run", "--quiet", "--ignore-installed", "--report", "-", "--target", name,
            "--constraint", str(constraints), *target, *requirements,
        )  # fmt: skip
    found = [package["metadata"] for package in json.loads(report)["install"]]
    return [f"{one['name']}=={one['version']}" for one in found if name_of(one["name"]) != "streamrl"]


def read_requirements(file: Path) -> list[str]:
    """Return the lines NAME==VERSION of a requirements file or of the output of `pip freeze`."""
    lines = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
    return [line for line in lines if "==" in line and " @ " not in line]


def names_of(installed: Path | None) -> set[str]:
    """Return the normalized names in a frozen list."""
    if installed is None:
        return set()
    lines = [line.split("#")[0].strip() for line in installed.read_text().splitlines()]
    return {name_of(line) for line in lines if line}


def name_of(requirement: str) -> str:
    """Return the normalized name of the package that a requirement names."""
    name = requirement.split("@")[0].split("=")[0].split("[")[0]
    return name.strip().lower().replace("_", "-").replace(".", "-")


def trim(folder: Path, rule: str) -> None:
    """Remove the files that match a rule NAME:GLOB from the wheel of that name, and from its list of files."""
    name, _, pattern = rule.partition(":")
    found = [wheel for wheel in folder.glob("*.whl") if name_of(wheel.name.split("-")[0]) == name_of(name)]
    if not found or not pattern:
        raise SystemExit(
            f"--drop {rule}: there is no wheel of that name among the packages, or no pattern after the colon"
        )
    wheel, trimmed = found[0], found[0].with_suffix(".trimmed")
    dropped = 0
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(trimmed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            if fnmatch(entry.filename, pattern):
                dropped += entry.compress_size
            elif entry.filename.endswith(".dist-info/RECORD"):
                new.writestr(entry, without(old.read(entry).decode(), pattern))
            else:
                new.writestr(entry, old.read(entry))
    trimmed.replace(wheel)
    print(f"{wheel.name}: left out {dropped / MIB:.0f} MiB ({pattern})", flush=True)


def without(record: str, pattern: str) -> str:
    """Return a wheel's RECORD without the files that match `pattern`."""
    kept = io.StringIO()
    csv.writer(kept, lineterminator="\n").writerows(
        row for row in csv.reader(record.splitlines()) if row and not fnmatch(row[0], pattern)
    )
    return kept.getvalue()


# --- parts ---------------------------------------------------------------------------------------


class PartWriter(io.RawIOBase):
    """Writes a stream of bytes as numbered files of at most `size` bytes, and their digests."""

    def __init__(self, folder: Path, size: int) -> None:
        super().__init__()
        self.parts: list[Path] = []
        self._folder, self._size, self._left = folder, size, 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Append `data` to the last part, and to new ones once it is full."""
        view = memoryview(data)
        while len(view):
            if not self._left:
                self.parts.append(self._folder / f"part-{len(self.parts):03d}")
                self._left = self._size
            piece, view = view[: self._left], view[self._left :]
            with self.parts[-1].open("ab") as file:
                file.write(piece)
            self._left -= len(piece)
        return len(data)


def write_parts(wheels: Iterable[Path], out: Path, *, size: int) -> list[Path]:
    """Write `wheels` as one archive in parts of at most `size` bytes, with SHA256SUMS; return the parts."""
    writer = PartWriter(out, size)
    with tarfile.open(fileobj=writer, mode="w|") as archive:
        for wheel in wheels:
            archive.add(wheel, arcname=wheel.name)
    sums = [f"{hashlib.sha256(part.read_bytes()).hexdigest()}  {part.name}" for part in writer.parts]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    return writer.parts


INSTALLER = '''"""Install the wheels of this folder, without network."""

import argparse
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Parts(io.RawIOBase):
    """The parts as one stream of bytes."""

    def __init__(self, files):
        self._files = iter(files)
        self._file = None

    def readable(self):
        return True

    def readinto(self, buffer):
        while True:
            if self._file is None:
                name = next(self._files, None)
                if name is None:
                    return 0
                self._file = open(name, "rb")
            count = self._file.readinto(buffer)
            if count:
                return count
            self._file.close()
            self._file = None


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--target", help="install into this folder, for PYTHONPATH, in place of the environment")
parser.add_argument("--wheels", help="keep the unpacked wheels in this folder")
options = parser.parse_args()
parts = []
for line in (HERE / "SHA256SUMS").read_text().splitlines():
    digest, name = line.split()
    part = HERE / name
    if not part.exists():
        raise SystemExit(f"{part} is missing: copy all parts into one folder")
    if hashlib.sha256(part.read_bytes()).hexdigest() != digest:
        raise SystemExit(f"{part} is damaged: copy it again")
    parts.append(part)
with tempfile.TemporaryDirectory() as temporary:
    folder = Path(options.wheels or temporary)
    with tarfile.open(fileobj=io.BufferedReader(Parts(parts)), mode="r|") as archive:
        archive.extractall(folder, filter="data")
    wheels = sorted(str(wheel) for wheel in folder.glob("*.whl"))
    where = ["--target", options.target, "--upgrade"] if options.target else []
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", *where, *wheels]
    sys.exit(subprocess.run(command).returncode)
'''

if __name__ == "__main__":
    main()
