"""The output of the demo: `streamrl run examples/smollm2_addition.toml`, as `make demo` runs it.

python benchmarks/demo.py
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from common import EXAMPLES, parser_of, run_example, write_results

EXAMPLE = EXAMPLES / "smollm2_addition.toml"
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
        os.environ["COLUMNS"] = str(WIDTH)
        output = run_example(EXAMPLE, {"run.name": "demo", **settings, "run.dir": folder})
        run_dir = Path(folder) / "demo"
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return Demo(
            printed=[line.rstrip() for line in output.replace(folder, "runs").splitlines()],
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
