"""From the files of a checkpoint into the places where a backend has its weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from streamrl.safetensors_files import MODEL, Part, Specs, TensorFiles
from streamrl.trainer.backends.base import Head

SCORE = "score.weight"
"""The scalar head."""


def read_weights(folder: Path, specs: Specs, parts: Iterable[Part], *, head: Head) -> None:
    """Fill `parts` of a model's weights from the checkpoint in `folder`; `specs`: all weights of the model.

    A scalar head that it has none of becomes zero. Raises `ModelError`, before anything is read, that names the files
    and weights that do not fit.
    """
    files = checked(folder, specs, head=head)
    for part in parts:
        if part.name == SCORE and SCORE not in files:
            part.values.zero_()
        else:
            files.read_into(part)


def checked(folder: Path, specs: Specs, *, head: Head) -> TensorFiles:
    """The files of the checkpoint in `folder`, which has the weights `specs`; raises `ModelError` as `read_weights`."""
    files = TensorFiles(folder, MODEL)
    optional = {SCORE} - set(files.names()) if head == "scalar" else set()
    files.check([spec for spec in specs if spec[0] not in optional])
    return files
