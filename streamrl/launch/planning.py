"""`streamrl plan`: a short run to see what things cost, or the folder of another one, and then the planner."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rich.console import Console

from streamrl.config import Config
from streamrl.planner.advice import Plan, make_plan
from streamrl.planner.calibration import check_plannable, make_short_run, read_calibration


def plan_run(config: Config, *, run_dir: Path | None, console: Console) -> Plan:
    """What a run of `config` would do, and what to change; `console` shows how far it is.

    Costs are those of the run in `run_dir`; None: of a short run, made in a folder that is removed afterwards.
    """
    check_plannable(config, calibrated=run_dir is not None)
    with console.status("") as status:

        def tell(what: str) -> None:
            status.update(what)

        if run_dir is not None:
            calibration = read_calibration(run_dir, planned=config)
        else:
            with tempfile.TemporaryDirectory(prefix="streamrl-plan-") as folder:
                calibration = read_calibration(make_short_run(config, folder=Path(folder), tell=tell))
        return make_plan(config, calibration, tell=lambda what: tell(f"simulating {what}"))
