"""Combine the data of a test run and write the figures to `tests/house/coverage.json`.

coverage run -m pytest && python tests/house/measure_coverage.py
"""

import datetime
import json
import subprocess
from pathlib import Path

from coverage.control import Coverage

_REPORT = Path(__file__).with_name("coverage.json")


def main() -> None:
    """Print the share of branches that the tests cover, and write it with commit and date."""
    coverage = Coverage(messages=False)
    coverage.combine()
    coverage.save()
    figures = _REPORT.with_suffix(".tmp")
    coverage.json_report(outfile=str(figures))
    totals = json.loads(figures.read_text(encoding="utf-8"))["totals"]
    figures.unlink()
    report = {
        "branches": totals["num_branches"],
        "branches_covered": totals["covered_branches"],
        "branches_percent": round(100 * totals["covered_branches"] / totals["num_branches"], 2),
        "lines": totals["num_statements"],
        "lines_covered": totals["covered_lines"],
        "lines_percent": round(100 * totals["covered_lines"] / totals["num_statements"], 2),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "make coverage",
    }
    _REPORT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
