"""Pictures of a run's graph of model function calls: text for the terminal, boxes and arrows for the page."""

from __future__ import annotations

import msgspec
from rich.text import Text
from rich.tree import Tree

from streamrl.trainer.graph import MFC, ROLLOUT, STREAM_KEYS, Graph

SOURCE = "StreamDataset"
SOURCE_NOTE = "what rollout workers generate by themselves"
NOTES = {"arrivals": "as groups arrive", "batch": "on each batch"}


class Box(msgspec.Struct, frozen=True):
    """One MFC, or the stream, in a picture of the graph."""

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
