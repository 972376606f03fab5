"""`dlio search`: search meta-parameters of `dlio train`, or of a script, over one staged copy."""

import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from dlio.cli.option_groups import with_help
from dlio.cli.option_records import ConfigFile
from dlio.cli.train_command import parts_of
from dlio.comm.launch_environment import under_mpi, under_torch
from dlio.data.splits import split_words
from dlio.errors import UsageError
from dlio.features.search.objectives import Objective, parse_objectives
from dlio.features.search.parameter_sampler import ParameterSampler, quiet_optuna
from dlio.features.search.search_options import SearchedRun, SearchedScript, SearchOptions
from dlio.features.search.search_space import (
    REFUSED,
    Point,
    argument_words,
    filled_in,
    parse_space,
    parse_words,
    train_words,
    with_point,
)
from dlio.features.search.searcher import CORES, STOPPED, Searcher, TrialProgram
from dlio.features.search.study import Study, TrialRecord
from dlio.features.search.successive_halving import SuccessiveHalving
from dlio.integrations.script.run_options import RunOptions
from dlio.train.names import DEFAULT_MODEL
from dlio.train.train_options import TrainOptions
from dlio.util.arguments import script_in
from dlio.util.child_processes import module_command
from dlio.util.cores import available_cores
from dlio.util.json_output import json_text
from dlio.util.options import as_mapping, options_of
from dlio.util.printable import print_line
from dlio.util.units import counted, format_bytes
from dlio.util.user_folders import make_folders
from dlio.util.whole_files import check_writable

if TYPE_CHECKING:
    from dlio.features.search.search_space import SearchSpace

# One staged copy for all trials
_SPARE: Final = 64 << 20
"""Bytes of a tier beyond those of the data: headers of blocks, and room for their sizes."""


def checked_tiers(tiers: str) -> str:
    """Return the tiers of --tiers. Raises UsageError for those that trials cannot share."""
    from dlio.storage.tier_spec import parse_tiers

    specs = parse_tiers(tiers)
    if not specs or any(spec.kind != "disk" for spec in specs):
        raise UsageError(
            f"--tiers {tiers}: trials share a copy in a folder; a RAM tier lives no longer than "
            "its trial. Name a folder: /local/scratch:200GiB, or /dev/shm/search:8GiB for memory"
        )
    return ",".join(map(str, specs))


def own_tiers(
    folder: str, paths: Sequence[tuple[str, str | None]], others: tuple[str, ...] = ()
) -> str:
    """Make a tier in the search's folder with room for data sets, (path, split) of each; return it
    for --tiers."""
    from dlio.data.reader import open_split
    from dlio.data.reader_contract import data_bytes

    total = 0
    for path, split in paths:
        reader = open_split(path, split, others)
        total += data_bytes(reader)
        reader.close()
    root = os.path.abspath(os.path.join(folder, "tiers"))
    os.close(make_folders(root))
    size = total + total // 8 + _SPARE
    return f"{root}:{-(-size >> 20)}MiB"


def stage(path: str, tiers: str, split: str | None = None, others: tuple[str, ...] = ()) -> int:
    """Stage a data set or a split, or the rest of it; return the bytes read from the source.

    Raises UsageError with the reason of `dlio stage`, and if another data set had to make room.
    """
    done = subprocess.run(
        [
            *module_command("dlio.cli"),
            "stage",
            path,
            "--tiers",
            tiers,
            "--json",
            *split_words(split, others),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UsageError(f"staging {path}: {said[-1].removeprefix('dlio: ').strip()}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if report["evicted"]:
        raise UsageError(
            f"--tiers {tiers}: too small for all data of the search, of which {path} takes "
            f"{format_bytes(report['data_bytes'])}: {report['evicted'][0]}; give more capacity"
        )
    return int(report["read_bytes"])


_TRIALS: Final = 20
_FREE: Final = ("tiers", "source", "val", "workers", "device", "on_error")
"""Options that may differ when a search goes on; the data are compared by their paths."""
_OF_SCRIPTS: Final = ("source", "epochs", "exchange", "seed", "tiers")
"""Options of `dlio train` that a search of a script takes."""
_CALLBACK: Final = "dlio.features.search.trial:make_callback"


@with_help(
    "dlio search /data --set lr=1e-3..1:log --set batch-size=16,32 -n 4",
    "dlio search /data --set model.width=16..64 --trials 50 --html plots.html",
    "dlio search --set lr=1e-4..1e-1:log --objective loss -- train.py --lr {lr}",
    groups={
        "Search": (
            *("space", "trials", "sampler", "lag", "objective", "pruner", "first_look"),
            *("reduction", "study", "html", "as_json"),
        ),
        "Ranks": ("ranks", "ranks_per_trial", "cores_per_rank"),
        "Options of all trials, as for `dlio train`": tuple(
            field.name for field in options_of(TrainOptions)
        ),
    },
    usual=(
        *("source", "space", "val", "trials"),
        ("objective", "Metric after the last epoch, such as loss or val_accuracy"),
        ("epochs", "Passes over the data of each trial"),
        ("sampler", "tpe, cmaes, random or grid"),
        ("tiers", "Caches, such as ram:8GiB,/scratch:200GiB"),
        *("ranks", "ranks_per_trial", "study", "html"),
    ),
)
def command(
    run: SearchedRun,
    search: SearchOptions,
    file: ConfigFile,  # noqa: ARG001 - read before
    script: SearchedScript,
) -> None:
    """Search meta-parameters by many trainings over one staged copy.

    The source is read once. Trials share the ranks of -n; one that ends early leaves its ranks to
    the next. The same command goes on with a search that was interrupted or killed, and all trials
    go on from their checkpoints. Exit codes: 0 when all trials are done, 75 when it was told to
    end (Ctrl-C, SIGTERM, SIGUSR1) and the same command goes on, 2 for an error.
    """
    if under_mpi() or under_torch():
        raise UsageError("dlio search starts ranks by itself: run it once, without mpirun, with -n")
    options = as_mapping(run)
    for name, reason in REFUSED.items():
        if options[name]:
            raise UsageError(f"--{name.replace('_', '-')} does not go with a search: {reason}")
    if run.survival.is_tolerant:
        raise UsageError(
            "--fault-tolerance: trials that lose a rank go on from their checkpoints: leave it out"
        )
    if search.html is not None:
        from dlio.features.search.search_display import check_plots

        check_plots()
        check_writable("--html", search.html)
    words = script.script[1:] if script.script[:1] == ("--",) else script.script
    if not run.data.source and not words:
        raise UsageError("SRC is missing: name the data, or a script after --")
    if words:
        script_in(words[0])
    for field in options_of(SearchedRun) if words else ():
        if field.name not in _OF_SCRIPTS and options[field.name] != field.default:
            raise UsageError(
                f"{field.flag} is an option of `dlio train`, not of a script: give it to the script"
            )
    if words and not search.objective:
        raise UsageError("--objective is missing: name the metric that the script prints")
    if run.data.source:
        source, val = parts_of(run.data)
        run = run.replaced(source=source, val=val)
    quiet_optuna()
    axes = parse_words(search.space, words) if words else parse_space(search.space, run)
    objectives = parse_objectives(search.objective, run.data.val is not None)
    _search(run, search, axes, objectives, words)


def _search(
    run: SearchedRun,
    search: SearchOptions,
    axes: "SearchSpace",
    objectives: Sequence[Objective],
    words: Sequence[str],
) -> None:
    from dlio.features.search.search_display import TrialTable, results, show_results, write_page

    def sampler(lag: int) -> ParameterSampler:
        directions = [each.direction for each in objectives]
        return ParameterSampler(search.sampler, axes, run.data.seed, lag, directions)

    lag = search.lag or 2 * search.at_a_time
    sampler(lag)  # Refuses parameters that it cannot search, before there is a folder.
    shared = checked_tiers(run.data.tiers) if run.data.tiers is not None else None
    cores = search.cores_per_rank or max(1, available_cores() // search.ranks)
    first = {"--lag": lag, CORES: cores}
    with Study(search.study, objectives, _fixed(run, search, words), first) as study:
        sampling = sampler(study.first["--lag"])
        for name, given in (("--lag", search.lag), (CORES, search.cores_per_rank)):
            if given not in (None, study.first[name]):
                raise UsageError(
                    f"{name} {given}: the search in {search.study} has begun with "
                    f"{study.first[name]}: leave it out"
                )
        chosen = ((run.data.source, run.data.split), (run.data.val, run.data.val_split))
        paths = [(path, split) for path, split in chosen if path]
        tiers = shared or (
            own_tiers(search.study, paths, run.data.reader_option) if paths else None
        )
        trials = min(search.trials or sampling.most or _TRIALS, sampling.most or 1 << 62)
        if tiers is not None and any(not r.has_ended for r in study.records) | (
            len(study.records) < trials
        ):
            for path, split in paths:
                print_line(f"staging {path} into {tiers}")
                study.add_staged(stage(path, tiers, split, run.data.reader_option))
        run = run.replaced(tiers=tiers)

        def work(point: Point, folder: str) -> TrialProgram:
            if words:
                return _script_work(filled_in(words, point), run, objectives)
            return _train_work(run, point, folder, objectives)

        def command(record: TrialRecord) -> list[str]:
            if words:
                return ["dlio", "run", *filled_in(words, record.point)]
            several = search.ranks_per_trial > 1
            ranks = ["-n", str(search.ranks_per_trial)] if several else []
            return ["dlio", "train", *_given_words(run), *train_words(record.point, run), *ranks]

        with TrialTable(study, trials) as shown:
            searcher = Searcher(
                study,
                sampling,
                search,
                trials,
                bool(words),
                work,
                _halving(search, run.optimizer.epochs),
                lambda teams: shown.update({t.record.number: t.waits for t in teams}),
            )
            is_done = searcher.run()
        show_results(study, command, bool(words))
        if search.html is not None:
            write_page(study, search.html, command)
        if search.as_json:
            print(json_text({**results(study, command), "starts_s": searcher.starts_s}))
        if not is_done:
            left = trials - sum(record.has_ended for record in study.records)
            print_line(f"told to end with {counted(left, 'trial')} left: the same command goes on")
            raise SystemExit(STOPPED)


def _halving(search: SearchOptions, epochs: int) -> SuccessiveHalving | None:
    if search.pruner == "none":
        return None
    make = SuccessiveHalving.hyperband if search.pruner == "hyperband" else SuccessiveHalving
    halving = make(epochs, search.first_look, search.reduction)
    if not halving.looks(0):
        raise UsageError(
            f"--pruner {search.pruner} --first-look {search.first_look}: no look before the "
            f"end of --epochs {epochs}: give more --epochs"
        )
    return halving


def _train_work(
    run: SearchedRun, point: Point, folder: str, objectives: Sequence[Objective]
) -> TrialProgram:
    config = with_point(run, point)
    config = config.replaced(
        checkpoint=os.path.join(folder, "checkpoint"),
        resume=True,
        keep=1,
        save=os.path.join(folder, "weights.pt"),
        # The search's own last: it has the final word on the epoch.
        callback=(*config.callbacks.callback, _CALLBACK),
    )
    return TrialProgram(
        "dlio.features.search.trial:run_training",
        [("dlio.train.config:TrainConfig", as_mapping(config)), _task(objectives)],
    )


def _script_work(
    words: Sequence[str], run: SearchedRun, objectives: Sequence[Objective]
) -> TrialProgram:
    options = RunOptions(exchange=run.ranks.exchange, tiers=run.data.tiers, seed=run.data.seed)
    return TrialProgram(
        "dlio.features.search.trial:run_script_trial",
        [
            ("dlio.integrations.script.run_options:RunOptions", as_mapping(options)),
            _task(objectives, words),
        ],
    )


def _task(
    objectives: Sequence[Objective], words: Sequence[str] = ()
) -> tuple[str, dict[str, object]]:
    names = [each.name for each in objectives]
    return "dlio.features.search.trial:TrialTask", {"objectives": names, "words": list(words)}


def _fixed(run: SearchedRun, search: SearchOptions, words: Sequence[str]) -> dict[str, object]:
    """Return the options that a search goes on with, by their names for users."""
    options = as_mapping(run)
    fixed: dict[str, object] = {
        field.flag: options[field.name]
        for field in options_of(SearchedRun)
        if field.name not in _FREE
    }
    names = ("space", "ranks_per_trial", "sampler", "pruner", "first_look", "reduction")
    fixed |= {
        field.flag: getattr(search, field.name)
        for field in options_of(SearchOptions)
        if field.name in (*names, "objective")
    }
    paths = {"SRC": run.data.source, "--val": run.data.val}
    fixed |= {name: os.path.abspath(path) if path else path for name, path in paths.items()}
    return {**fixed, "script": shlex.join(words)}


def _given_words(run: SearchedRun) -> list[str]:
    """Return the arguments of `dlio train` for options that differ from their defaults."""
    words = [run.data.source]
    options = as_mapping(run)
    for field in options_of(TrainOptions):
        value = options[field.name]
        if field.option.positional or field.name == "tiers" or value == field.default:
            continue
        if field.name == "model" and value == DEFAULT_MODEL:
            continue
        words += argument_words(field.flag[2:], value)
    return words
