"""`streamrl export`: a run's checkpoint as a Hugging Face model."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from streamrl.errors import ConfigError, ModelError
from streamrl.export import export
from streamrl.records import progress

EXPORTS = "exports"
"""Default folder of exports, in the run's folder."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_run(run_dir: Path, *, step: int | None, to: Path | None, dtype: str) -> Path:
    """Export the checkpoint of policy version `step`, or the last one, of the run in `run_dir`; return its folder.

    `run_dir` may also be the folder of a checkpoint. The export's folder appears when all of it is on the disk. Raises
    `ConfigError` if the checkpoint does not exist or the export does already, and `ModelError` if the checkpoint cannot
    be read or the export cannot be written.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: there are {', '.join(DTYPES)}")
    checkpoint = _checkpoint(run_dir, step)
    place = Path(os.path.abspath(checkpoint))  # resolves "."
    home = run_dir if checkpoint != run_dir else place.parent.parent
    target = to or home / EXPORTS / (place.name if dtype == "float32" else f"{place.name}-{dtype}")
    if target.exists():
        raise ConfigError(f"{target} exists already; remove it, or name another folder by --to")
    try:
        progress.write_folder(target, lambda folder: export(checkpoint, folder, dtype=DTYPES[dtype]))
    except OSError as error:
        raise ModelError(
            f"{target} cannot be written: {error}; make room there, or name another folder by --to"
        ) from error
    return target


def _checkpoint(run_dir: Path, step: int | None) -> Path:
    if (run_dir / progress.STATE / progress.FILE).is_file():
        return run_dir
    found = progress.checkpoints(run_dir)
    if not found:
        raise ConfigError(f"{run_dir} has no checkpoint; give the folder of a run, as runs/NAME")
    if step is None:
        return found[-1]
    versions = {progress.read(folder).policy_version: folder for folder in found}
    if step not in versions:
        raise ConfigError(
            f"--step {step}: {run_dir} has checkpoints of the steps {', '.join(map(str, sorted(versions)))}"
        )
    return versions[step]
