"""Measure, and keep the report for the site.

    python docs/dlio_docs/measure.py loader --title "Loading" --data "1,000 pictures" -- \\
        dlio bench loader imagenet/train --peers torch,dlio

Runs the command with `--report` added and writes docs/benchmarks/data/NAME.json. The report itself
has the commit, the machine and its load.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "benchmarks" / "data"


def main() -> int:
    """Return the command's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--title", required=True)
    parser.add_argument("--data", required=True, help="the data set, in words")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run([*asked.command, "--report", str(report)], check=False)
        if done.returncode:
            return done.returncode
        measured = json.loads(report.read_text(encoding="utf-8"))
    stored = {
        "title": asked.title,
        "command": " ".join(asked.command),
        "data": asked.data,
        "report": measured,
    }
    DATA.mkdir(parents=True, exist_ok=True)
    text = json.dumps(stored, indent=1) + "\n"
    (DATA / f"{asked.name}.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
