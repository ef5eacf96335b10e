"""What the README and the pages in docs/ name is there: files, folders, and modules with what they hold."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest

from streamrl.config import Config, from_dict

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACES = [ROOT, ROOT / "streamrl", ROOT / "docs"]
"""Where a path on a page may begin."""
OF_A_RUN = {
    ".slurm/",
    "benchmarks/results/latest/NAME.json",
    "checkpoints/",
    "config.toml",
    "gsm8k.toml",
    "logs/",
    "plots/",
    "record/",
    "rollouts/",
    "runs/",
    "slurm.toml",
    "state/",
    "summary.json",
    "tensorboard/",
    "wandb/",
    "weights/",
}
"""What a run leaves, or a user writes or makes; not in the repository."""
PATH = re.compile(
    r"`([\w./-]+\.(?:py|md|toml|c|h)|[\w./-]+/)`"
    r"|\]\(([\w./-]+\.\w+)\)"
    r"|(?<![\w/])((?:docs|benchmarks)/[\w./]+\.\w+)"
)
ROW = re.compile(r"^\| .* \| `([\w/]+\.py)` \| ([`\w., ]+) \|$", re.MULTILINE)
"""In a table of docs/paths.md: what happens, the file, its functions."""
NAME = re.compile(r"`(streamrl(?:\.\w+)+)`")
IMPORT = re.compile(r"^from (streamrl[\w.]*) import (.+)$", re.MULTILINE)
"""In an example."""
MOST_LINES = {
    "A prompt, from its data source to the gradient": 1325,
    "A weight update": 540,
    "A gserver dies": 340,
    "A model worker dies, or the controller": 290,
}
"""Lines of code to read on each path of docs/paths.md. Who needs more looks first for what does not belong there."""


def paths_of(text: str) -> set[str]:
    """Files and folders that `text` names: in backticks, as the target of a link, or as a page in docs/."""
    found = {next(group for group in match.groups() if group) for match in PATH.finditer(text)}
    return {path for path in found if not path.startswith(("/", "http")) and path not in OF_A_RUN}


def is_there(path: str) -> bool:
    """Whether `path` begins at one of `PLACES`; a file's name alone may be in any folder of code."""
    if any((place / path).exists() for place in PLACES):
        return True
    if "/" in path:
        return False
    return any(any((ROOT / place).rglob(path)) for place in ("streamrl", "tests", "benchmarks"))


def modules_of(text: str) -> list[str]:
    """Modules that `text` names, and what it has of them."""
    imports = [f"{module}.{name}" for module, names in IMPORT.findall(text) for name in names.split(", ")]
    return [*NAME.findall(text), *imports]


def can_be_imported(name: str) -> bool:
    """Whether `name` is a module, or something in one."""
    module, attributes = name, list[str]()
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name) or "." not in module:
                return False
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
    for attribute in attributes:
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text()
    assert sorted(path for path in paths_of(text) if not is_there(path)) == []
    assert [name for name in modules_of(text) if not can_be_imported(name)] == []


def test_the_check_itself() -> None:
    text = "`ledger.py`, `nowhere/at_all.py`, [figures](docs/figures.md), see docs/none.md, `trainer/master/`"
    assert paths_of(text) == {"ledger.py", "nowhere/at_all.py", "docs/figures.md", "docs/none.md", "trainer/master/"}
    assert {path for path in paths_of(text) if not is_there(path)} == {"nowhere/at_all.py", "docs/none.md"}
    example = "`streamrl.errors`\nfrom streamrl.trainer.graph import MFC, downstream\n"
    assert modules_of(example) == ["streamrl.errors", "streamrl.trainer.graph.MFC", "streamrl.trainer.graph.downstream"]
    assert can_be_imported("streamrl.ledger.Ledger")
    assert can_be_imported("streamrl.errors")
    assert not can_be_imported("streamrl.errors.NoSuchError")
    assert not can_be_imported("streamrl.no_such_module")


def defined_in(tree: ast.Module | ast.ClassDef, prefix: str = "") -> dict[str, int]:
    """Names of the functions and classes in `tree`, those in classes with the classes' names before them → lines."""
    found: dict[str, int] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(decorator.lineno for decorator in (*node.decorator_list, node))
            found[prefix + node.name] = (node.end_lineno or first) - first + 1
        if isinstance(node, ast.ClassDef):
            found |= defined_in(node, f"{prefix}{node.name}.")
    return found


def named_in(text: str) -> dict[str, int | None]:
    """Functions that the tables in `text` name, each with its file → lines; None: it is not in that file."""
    found: dict[str, int | None] = {}
    for path, names in ROW.findall(text):
        there = defined_in(ast.parse((ROOT / "streamrl" / path).read_text()))
        found |= {f"{path}: {name}": there.get(name) for name in re.findall(r"`([\w.]+)`", names)}
    return found


def lacking(text: str) -> list[str]:
    """Functions that the tables in `text` name and that are not in the files beside them."""
    return [name for name, lines in named_in(text).items() if lines is None]


def test_the_paths_through_the_code_lead_through_functions_that_there_are() -> None:
    text = (ROOT / "docs" / "paths.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    assert len(ROW.findall(text)) == len(rows) > 50
    assert lacking(text) == []
    assert lacking("| a | `ledger.py` | `Ledger.admit`, `Ledger.adm` |") == ["ledger.py: Ledger.adm"]


def test_the_paths_through_the_code_stay_short() -> None:
    sections = re.split(r"^## ", (ROOT / "docs" / "paths.md").read_text(), flags=re.MULTILINE)[1:]
    lines = {part.split("\n")[0]: sum(count or 0 for count in named_in(part).values()) for part in sections}
    assert lines.keys() == MOST_LINES.keys()
    assert {title: count for title, count in lines.items() if count > MOST_LINES[title]} == {}


def names_in(text: str) -> dict[str, list[str]]:
    """Names of the design documents in the tables of `text` → targets here."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", text, re.MULTILINE)
    return {name: re.findall(r"`([^`]+)`", targets) for name, targets in rows if name != "name there"}


def exists(target: str) -> bool:
    """Whether `target` can be imported, or is a setting."""
    if target.startswith("streamrl."):
        return can_be_imported(target)
    try:
        attrgetter(target)(Config())
    except AttributeError:
        return False
    return True


def test_each_name_of_the_design_documents_has_a_target() -> None:
    table = names_in((ROOT / "docs" / "design-names.md").read_text())
    names = set(re.findall(r"`([^`]+)`", " ".join(table)))
    wanted = """
        AsyncIOSequenceBuffer put_batch get_batch_for_rpc amend_batch load_data FunctionExecutor ModelFunctionCall
        request_reply_stream fetch spec model_config clear_data_cache initialize generate inference train_step flush
        ParamRealloc DataTransfer Redistributor DataManager StreamDataset PPOActorInterface MultiTaskRewardInterface
        MasterWorkerECS Commands ModelQuery DataQuery RawDataQuery set_data build_model_inputs leveled_exec_funcs
        worker_info data_streams model_streams ExperimentConfig total_train_epochs save_frequency_epochs
        save_frequency_steps save_frequency_seconds eval_frequency_epochs eval_frequency_steps eval_frequency_seconds
        MockedServer ServerWithTask enqueue_task create_and_launch_task_pool BufferDataset MultiRoundBufferDataset
        notify_score actor_gen rew_inf ref_inf actor_inf critic_inf critic_train actor_train
    """
    assert set(wanted.split()) - names == set()
    assert [name for name, targets in table.items() if not targets] == []
    assert [target for targets in table.values() for target in targets if not exists(target)] == []
    assert not exists("trainer.save_every_eon")
    assert not exists("streamrl.ecs.NoSuchName")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_configuration_on_a_page_is_valid(page: Path) -> None:
    for block in re.findall(r"^```toml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        from_dict(tomllib.loads(block), where=block)
