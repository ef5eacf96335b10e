"""Drawings of a run's graph of model function calls: text for the terminal, SVG for other uses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from streamrl import config as configuration
from streamrl.errors import ConfigError
from streamrl.trainer.graph import MFC, ROLLOUT, STREAM_KEYS, Graph, graph_of

SOURCE = "StreamDataset"
SOURCE_NOTE = "what rollout workers generate by themselves"
NOTES = {"arrivals": "as groups arrive", "batch": "on each batch"}
LABEL_PLACE = 0.42
"""Position of a label on its arrow, as a share of its length: nearer to the source, as arrows cross in the middle."""
NAMED_KEYS = 3
"""Most keys that are named on one arrow; more are only counted."""


class Box(msgspec.Struct, frozen=True):
    """One MFC, or the stream, in a drawing of the graph."""

    name: str
    note: str
    """The model that computes it, and the groups that it reads."""
    column: int
    """Topological level."""
    row: int


class Arrow(msgspec.Struct, frozen=True):
    """The keys that one box passes to another."""

    giver: str
    taker: str
    keys: list[str]


def show_graph(config_file: Path, overrides: Sequence[str], console: Console, *, svg: Path | None) -> None:
    """Print the graph of a configuration, and draw it into the file `svg`. Raises `ConfigError` if that cannot be
    written."""
    graph = graph_of(configuration.load(config_file, overrides))
    console.print(graph_text(graph))
    if svg is None:
        return
    try:
        write_svg(graph, svg)
    except OSError as error:
        raise ConfigError(f"--svg {svg}: cannot be written ({error.strerror})") from error
    console.print(f"drawn into {svg}", markup=False, soft_wrap=True)


def drawing(graph: Graph) -> tuple[list[Box], list[Arrow]]:
    """Return boxes in columns, each to the right of its inputs, and an arrow from each input."""
    notes = {SOURCE: SOURCE_NOTE, **{mfc.name: _note(mfc) for mfc in graph.mfcs}}
    boxes = [Box(name, notes[name], column, row) for name, (column, row) in _places(graph).items()]
    arrows = [Arrow(giver, mfc.name, keys) for mfc in graph.mfcs for giver, keys in sorted(_inputs(graph, mfc).items())]
    return boxes, arrows


def graph_text(graph: Graph) -> Tree:
    """Return the MFCs by topological level, each with its model, its keys and their providers."""
    tree = Tree(Text("model function calls"))
    if given := _given(graph):
        branch = tree.add(Text.assemble((SOURCE, "bold"), f"  {SOURCE_NOTE}"))
        branch.add(f"gives {', '.join(sorted(given))}")
    for number, level in enumerate(graph.levels, start=1):
        of_level = tree.add(f"level {number}")
        for mfc in level:
            branch = of_level.add(
                Text.assemble((mfc.name, "bold"), f"  {mfc.function or mfc.interface} of {_note(mfc)}")
            )
            for giver, keys in sorted(_inputs(graph, mfc).items()):
                branch.add(f"needs {', '.join(keys)}  from {giver}")
            if mfc.outputs:
                branch.add(f"gives {', '.join(sorted(mfc.outputs))}")
    return tree


def write_svg(graph: Graph, file: Path) -> None:
    """Draw boxes in columns, each to the right of its inputs, and an arrow from each input."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    boxes, arrows = drawing(graph)
    places = {box.name: (box.column, box.row) for box in boxes}
    columns, rows = (1 + max(axis) for axis in zip(*places.values(), strict=True))
    figure, axes = plt.subplots(figsize=(4.4 * columns, 1.6 * rows + 0.6))
    axes.set_xlim(-0.6, columns - 0.4)
    axes.set_ylim(rows - 0.4, -0.8)
    axes.axis("off")
    for box in boxes:
        note = box.note.replace("workers generate", "workers\ngenerate")
        axes.text(
            box.column,
            box.row,
            f"{box.name}\n{note}",
            ha="center",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.6", "facecolor": "#eef3fa", "edgecolor": "#4a6fa5"},
        )
    for arrow in arrows:
        begin, end = places[arrow.giver], places[arrow.taker]
        skipped = end[0] - begin[0] - 1  # number of columns that the arrow passes above
        style = {
            "arrowstyle": "->",
            "color": "#4a6fa5",
            "shrinkA": 55,
            "shrinkB": 55,
            "connectionstyle": f"arc3,rad={-0.28 * skipped:.2f}",
        }
        axes.annotate("", xy=end, xytext=begin, arrowprops=style)
        label = ",\n".join(arrow.keys) if len(arrow.keys) <= NAMED_KEYS else f"{len(arrow.keys)} keys"
        label_x = begin[0] + LABEL_PLACE * (end[0] - begin[0])
        label_y = begin[1] + LABEL_PLACE * (end[1] - begin[1]) - 0.5 * skipped
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.text(label_x, label_y, label, ha="center", va="center", fontsize=7, bbox=white)
    figure.savefig(file, format="svg", bbox_inches="tight")
    plt.close(figure)


def _note(mfc: MFC) -> str:
    """Return the model that computes `mfc`, and the groups that it reads."""
    return "rollout workers, when called" if mfc.role == ROLLOUT else f"{mfc.role}, {NOTES[mfc.reads]}"


def _given(graph: Graph) -> frozenset[str]:
    """Return the keys that come with the stream without a call of the controller."""
    return (STREAM_KEYS & graph.stream_keys).difference(*(mfc.outputs for mfc in graph.of_rollout))


def _inputs(graph: Graph, mfc: MFC) -> dict[str, list[str]]:
    """Return the inputs of `mfc` by provider."""
    givers = dict.fromkeys(STREAM_KEYS, SOURCE) | {key: other.name for other in graph.mfcs for key in other.outputs}
    found: dict[str, list[str]] = {}
    for key in sorted(mfc.inputs):
        found.setdefault(givers[key], []).append(key)
    return found


def _places(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return column and row of each box: a column for the stream, if it gives keys, and for each level."""
    columns = [[SOURCE]] if _given(graph) else []
    columns += [[mfc.name for mfc in level] for level in graph.levels]
    return {name: (column, row) for column, names in enumerate(columns) for row, name in enumerate(names)}
