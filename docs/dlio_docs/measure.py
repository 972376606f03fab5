"""Measure, and keep the report for the site.

    python docs/dlio_docs/measure.py loader --title "Loading" --data "1,000 pictures" -- \\
        dlio bench loader imagenet/train --peers torch,dlio

Runs the command with `--report` added and writes docs/benchmarks/data/NAME.json with the command,
the commit, the machine and its load.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "benchmarks" / "data"
_PACKAGES = ("dlio", "torch", "numpy", "simplejpeg", "opencv-python-headless", "pillow")


def main() -> int:
    """Return the command's exit status."""
    from dlio_bench.results.environment import describe_machine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--title", required=True)
    parser.add_argument("--data", required=True, help="the data set, in words")
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args()
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        done = subprocess.run([*asked.command, "--report", str(report)], check=False)
        if done.returncode:
            return done.returncode
        measured = json.loads(report.read_text(encoding="utf-8"))
    load.append(os.getloadavg()[0])
    stored = {
        "title": asked.title,
        "command": " ".join(asked.command),
        "date": datetime.now(UTC).date().isoformat(),
        "data": asked.data,
        "load_average": load,
        "machine": describe_machine(_PACKAGES),
        "report": measured,
    }
    DATA.mkdir(parents=True, exist_ok=True)
    text = json.dumps(stored, indent=1) + "\n"
    (DATA / f"{asked.name}.json").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
