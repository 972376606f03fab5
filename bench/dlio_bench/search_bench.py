"""`dlio bench search`: a search on several ranks, compared with one trial after another.

All cases are whole commands `dlio search` with the same seed, so that they try the same parameters.
The network sleeps for a time for each sample, as long as an accelerator would compute, so that
ranks which share cores do not slow each other. The case `storm` kills ranks, the process that forks
them and the searcher by SIGKILL at random times, and starts the searcher again.
"""

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from statistics import median
from typing import Annotated, Any, Final

from dlio.cli.option_records import OutputOptions
from dlio.errors import DlioError
from dlio.util.child_processes import module_command
from dlio.util.options import CheckedOptions, Option
from dlio_bench.bench_data import payload_bytes
from dlio_bench.bench_processes import children, command_line
from dlio_bench.results.envelope import begin, finish
from dlio_bench.results.figure_collection import results_of
from dlio_bench.results.terminal import show_figures, working

CASES: Final = ("one-by-one", "packed", "asha", "storm")
_TIMEOUT_S: Final = 7200.0
_FORKER: Final = "dlio.launch.node.zygote"
_NETWORK: Final = "dlio_bench.exchange_cases.paced_network:paced_network"


@dataclass(frozen=True, slots=True)
class SearchChoice(CheckedOptions):
    """The search that is measured."""

    source: Annotated[
        str, Option("Training images in class folders.", positional=True, metavar="SRC")
    ]
    val: Annotated[str, Option("Held-out images.", metavar="PATH")] = ""
    cases: Annotated[
        tuple[str, ...],
        Option(
            "one-by-one: a rank, no early ends. packed: -n ranks. asha: -n ranks and early ends. "
            "storm: as asha, with SIGKILLs. Repeatable.",
            name="case",
            choices=CASES,
            default_text="all",
        ),
    ] = CASES
    ranks: Annotated[int, Option("Ranks of the packed cases.", short="-n", least=1)] = 4
    trials: Annotated[int, Option("Number of trials.", least=1)] = 24
    epochs: Annotated[int, Option("Epochs of each trial.", least=2)] = 9
    sample_ms: Annotated[
        float, Option("Sleep of the network for each sample.", unit="milliseconds", least=0)
    ] = 1.0
    space: Annotated[
        tuple[str, ...], Option("Parameters, as for `dlio search`. Repeatable.", name="set")
    ] = ("lr=1e-3..1:log", "batch-size=16,32")
    kills: Annotated[int, Option("SIGKILLs of the storm.", least=1)] = 10
    every_s: Annotated[
        float, Option("Mean time between two kills.", unit="seconds", above=0, name="every")
    ] = 4.0
    seed: Annotated[int, Option("Seed of searches and kills.", least=0)] = 0


@dataclass(slots=True)
class _SearchRun:
    seconds: float
    results: dict[str, Any]
    kills: dict[str, int]


def measure(choice: SearchChoice, folder: str) -> dict[str, object]:
    """Run the cases, whose studies lie in `folder`; return their figures, and whether the storm
    changed a result."""
    total = sum(map(payload_bytes, filter(None, (choice.source, choice.val))))
    runs = {case: _run(choice, case, folder) for case in choice.cases}
    rows = [_row(case, run, total) for case, run in runs.items()]
    alone, packed, asha, storm = (runs.get(case) for case in CASES)
    said = []
    for case in ("packed", "asha"):
        if alone and case in runs:
            share = runs[case].seconds / alone.seconds
            said.append(f"{case}: {share:.2f} of the time of one by one")
    if packed and alone:
        said.append(f"packed: all results {_equality(packed, alone)} those of one by one")
    if storm and asha:
        equal = _equality(storm, asha)
        said.append(f"storm: after {storm.kills} kills, all results {equal} those without")
    return {"rows": rows, "said": said}


def _row(case: str, run: _SearchRun, total: int) -> dict[str, object]:
    trials, starts = run.results["trials"], run.results["starts_s"]
    best = run.results["best"][0] if run.results["best"] else {"values": {"none": None}}
    return {
        "case": case,
        "seconds": run.seconds,
        "trials": float(len(trials)),
        "ended_early": float(sum(each["state"] == "pruned" for each in trials)),
        "epochs": float(sum(len(each["epochs"]) for each in trials)),
        "best": next(iter(best["values"].values())),
        "source_read_times": (run.results["staged_bytes"] + run.results["trial_source_bytes"])
        / total,
        "start_ms": 1e3 * median(starts) if starts else None,
        "slowest_start_ms": 1e3 * max(starts) if starts else None,
    }


def _equality(one: _SearchRun, other: _SearchRun) -> str:
    return "equal" if one.results["trials"] == other.results["trials"] else "DIFFER FROM"


def _run(choice: SearchChoice, case: str, folder: str) -> _SearchRun:
    """Run a search to its end, however often it is killed."""
    words = _words(choice, case, os.path.join(folder, case))
    draw = random.Random(choice.seed)
    left = choice.kills if case == "storm" else 0
    kills = dict.fromkeys(("rank", "forker", "searcher"), 0)
    began = time.monotonic()
    while True:
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
            )
            try:
                while process.poll() is None:
                    if time.monotonic() - began > _TIMEOUT_S:
                        raise DlioError(f"{case}: not done after {_TIMEOUT_S:.0f} s: try less")
                    pause = draw.expovariate(1 / choice.every_s) if left else _TIMEOUT_S
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(pause)
                    if left and (kind := _kill(process.pid, draw)) is not None:
                        kills[kind] += 1
                        left -= 1
            finally:
                process.kill()
                process.wait()
            said.seek(0)
            lines = said.read().splitlines()
        if process.returncode == 0:
            return _SearchRun(time.monotonic() - began, json.loads(lines[-1]), kills)
        if process.returncode != -signal.SIGKILL:
            raise DlioError(f"{case}: {' '.join(words)}: {' '.join(lines[-3:])}")


def _words(choice: SearchChoice, case: str, study: str) -> list[str]:
    is_alone = case == "one-by-one"
    paced = f"{_NETWORK}(model='lenet',sample_ms={choice.sample_ms})"
    val = ["--val", choice.val] if choice.val else []
    return [
        *(*module_command("dlio.cli"), "search", choice.source, *val, "--study", study, "--json"),
        *("--trials", str(choice.trials), "--epochs", str(choice.epochs)),
        *("--seed", str(choice.seed), "--sampler", "random", "--image-size", "32"),
        *("--model", paced, "--cores-per-rank", "1"),
        *("-n", "1" if is_alone else str(choice.ranks)),
        *("--pruner", "asha" if case in ("asha", "storm") else "none"),
        *(word for each in choice.space for word in ("--set", each)),
    ]


def _kill(searcher: int, draw: random.Random) -> str | None:
    """Kill a process of a search; return its kind, None if there is none of the kind drawn."""
    below = children()
    forkers = [each for each in below.get(searcher, []) if _FORKER in command_line(each)]
    ranks = [rank for forker in forkers for rank in below.get(forker, [])]
    kind = draw.choices(("rank", "forker", "searcher"), (6, 2, 2))[0]
    victims = {"rank": ranks, "forker": forkers, "searcher": [searcher]}[kind]
    with suppress(ProcessLookupError, IndexError):  # None of its kind is there, or not any more.
        os.kill(draw.choice(victims), signal.SIGKILL)
        return kind
    return None


def command(choice: SearchChoice, output: OutputOptions) -> None:
    """Measure `dlio search`, compared with one trial after another, and under SIGKILLs.

    The network sleeps for each sample as an accelerator would compute. Figures are whole commands:
    seconds, epochs trained, the best result, how often the source was read, and the time from the
    decision to start a trial to the first line of its program.
    """
    start = begin(output)
    with working("search"), tempfile.TemporaryDirectory(prefix="search-bench-") as folder:
        report: Mapping[str, Any] = measure(choice, folder)
    results = results_of(
        "search",
        report,
        settings=asdict(choice),
        seeds={"search": choice.seed},
        paths=(choice.source,),
    )
    show_figures("search", results.figures, results.ratios)
    print("\n".join(report["said"]))
    finish(output, results, start)
