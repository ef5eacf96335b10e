"""`streamrl check`: show a run's settings and processes, and rehearse the run; or check a model.

The modules that do so import torch, which takes seconds; the settings are shown before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from streamrl import config as configuration
from streamrl.launch.process import set_up_logging
from streamrl.launch.processes import ProcessPlan, plan, visible_gpus


def check_config(file: Path, overrides: Sequence[str], console: Console, errors: Console, *, everything: bool) -> int:
    """Show the settings and processes of a run, and rehearse it on this machine; return the exit code.

    `everything`: also show settings that have their default values.
    """
    set_up_logging("check")
    config, gpus = configuration.load(file, overrides), visible_gpus()
    toml = configuration.to_toml(config, only_changed=not everything)
    if not everything:
        toml = f"# settings that differ from the defaults (--all shows all settings)\n{toml}"
    if console.is_terminal:
        console.print(Syntax(toml, "toml", background_color="default"))
    else:
        console.print(toml, markup=False, soft_wrap=True)
    console.print(_plan_table(plan(config, gpus=gpus)))
    from streamrl.launch.rehearsal import rehearse

    found = rehearse(config, gpus=gpus)
    for mark, style, lines in (
        ("✓", "green", found.tried),
        ("? not tried:", "yellow", found.untried),
        ("! warning:", "yellow", found.warnings),
    ):
        for line in lines:
            console.print(Text.assemble((f"{mark} ", style), line), soft_wrap=True)
    for line in found.wrong:
        errors.print(Text(f"error: {line}", style="red"), soft_wrap=True)
    if found.wrong:
        return 1
    text = f"{file} is valid; its run folder is {config.run_dir}, its fingerprint {config.digest()}"
    console.print(Text(text, style="green"), soft_wrap=True)
    return 0


def check_model(folder: Path, console: Console, *, full: bool) -> int:
    """Show how trainer and embedded engine compute the model in `folder`; return 1 if a part fails, else 0."""
    from streamrl.launch import model_check

    set_up_logging("check")
    results = model_check.check_model(folder.expanduser(), full=full)
    table = Table("part", "result", "why")
    for result in results:
        table.add_row(*result)
    console.print(table)
    return int(any(result.verdict == "fails" for result in results))


def _plan_table(processes: Sequence[ProcessPlan]) -> Table:
    """Return a table of `processes`, one row for each role and device."""
    table = Table("role", "count", "threads each", "device")
    for (role, threads, device), count in Counter((p.role, p.threads, p.device) for p in processes).items():
        table.add_row(role, str(count), str(threads), device)
    return table
