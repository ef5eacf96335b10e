"""The output of the demo: `streamrl run examples/smollm2_addition.toml`, as `make demo` runs it.

python benchmarks/demo.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, parser_of, write_results

EXAMPLE = ROOT / "examples" / "smollm2_addition.toml"
WIDTH = 120


class Demo(NamedTuple):
    printed: list[str]
    """Lines, as on something that is no terminal."""
    steps: list[dict[str, float]]
    """The metrics of each."""
    summary: dict[str, Any]


def run(**settings: object) -> Demo:
    """Run the example as a user would, with `settings` by section and key; exit if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"{key}={value}" for key, value in {**settings, "run.dir": folder}.items()]
        command = [sys.executable, "-m", "streamrl", "run", str(EXAMPLE), "run.name=demo", *overrides]
        environment = os.environ | {"COLUMNS": str(WIDTH)}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=1800, check=False, cwd=ROOT, env=environment
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        run_dir = Path(folder) / "demo"
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return Demo(
            printed=[line.rstrip() for line in done.stdout.replace(folder, "runs").splitlines()],
            steps=[json.loads(line)["metrics"] for line in lines],
            summary=json.loads((run_dir / "summary.json").read_text()),
        )


def main() -> None:
    parser_of(__doc__).parse_args()
    found = run()
    print("\n".join(found.printed))
    print(f"written to {write_results('demo', {'example': EXAMPLE.name}, [found._asdict()])}")


if __name__ == "__main__":
    main()
