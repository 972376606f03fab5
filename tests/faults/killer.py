"""Jobs whose ranks are killed from outside, and a count of samples by the weights they leave.

Nothing here asks dlio's own count but to compare it: who is killed is drawn here, and the samples
of each step are read off the weights (`named_weights`), of all ranks that are left, of the file of
`--save` and of the newest checkpoint.
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tests.conftest import SOURCES
from tests.faults.named_weights import STEP, STEPS, shades
from tests.warm.pool import WarmPython

SAMPLES: Final = 48
HELD_OUT: Final = 12
_POLL_S: Final = 0.005
_APART: Final = ("gossip", "noloco", "asgd")
"""Exchanges whose ranks have weights of their own."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A SIGKILL to a rank so many seconds after it has finished a number of steps."""

    rank: int
    step: int
    later_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Case:
    """A job and who is lost in it."""

    exchange: str = "allreduce"
    backend: str = "mpi"
    ranks: int = 3
    kills: tuple[Kill, ...] = ()
    spares: int = 0
    nodes: int = 1
    accumulate: int = 1
    epochs: int = 2
    val: bool = False
    checkpoint: bool = False
    on_loss: str = "keep"
    script: bool = False
    """True for `dlio run` of `named_script`."""
    callback: str = ""
    """Of `interleavings`, if it is what ends ranks; `lost` has their numbers."""
    lost: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The job in one line."""
        features = ["dlio run"] if self.script else []
        features += [f"{self.ranks} ranks"]
        features += [f"+{self.spares} spares"] if self.spares else []
        features += [f"{self.nodes} nodes"] if self.nodes > 1 else []
        features += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        features += ["val"] if self.val else []
        features += ["checkpoint"] if self.checkpoint else []
        features += [self.on_loss] if self.on_loss != "keep" else []
        kills = [f"{each.rank}@{each.step}+{each.later_s * 1000:.0f}ms" for each in self.kills]
        return f"{self.exchange}/{self.backend} {', '.join(features)}; kills {' '.join(kills)}"

    @property
    def alike(self) -> bool:
        """True if all ranks have one model at the end of an epoch."""
        return self.exchange.split("(")[0].split("+")[0] not in _APART


@dataclass(slots=True)
class Verdict:
    """The outcome of a job."""

    case: Case
    wrong: list[str] = field(default_factory=list)
    """Complaints; none if all is as promised."""
    killed: list[int] = field(default_factory=list)
    seconds: float = 0.0
    output: str = ""

    def line(self) -> str:
        """The verdict in one line of JSON."""
        return json.dumps(
            {
                "case": asdict(self.case),
                "name": self.case.name,
                "killed": self.killed,
                "seconds": round(self.seconds, 1),
                "wrong": self.wrong,
            }
        )


def draw_pictures(folder: Path) -> None:
    """Make the training and the held-out data, whose pictures tell their number."""
    from PIL import Image

    for part, count in (("train", SAMPLES), ("val", HELD_OUT)):
        for number in range(count):
            own = folder / part / ("a" if number < count // 2 else "b")
            own.mkdir(parents=True, exist_ok=True)
            red, green = shades(number)
            Image.new("RGB", (16, 16), (red, green, 0)).save(own / f"{number:03}.png")


def run_case(
    case: Case,
    data: Path,
    folder: Path,
    deadline_s: float = 240.0,
    sources: str = SOURCES,
    pause_s: float = 0.03,
) -> Verdict:
    """Run a job, kill its ranks, and judge the files that it leaves in a new folder."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    verdict = Verdict(case)
    options = _train_options(case, data) if not case.script else _run_options(case)
    environment = {
        **os.environ,
        "PYTHONPATH": sources,
        "DLIO_CACHE": str(folder / "cache"),
        "DLIO_TIMEOUT": str(int(deadline_s * 0.6)),
        "NAMED_FOLDER": str(folder),
        "NAMED_SAMPLES": str(SAMPLES),
        "NAMED_PAUSE_S": str(pause_s),
        "OMP_NUM_THREADS": "1",
    }
    with (
        open(folder / "output", "wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "dlio.cli", *options],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as job,
    ):
        killer = _Killer(case, folder)
        while job.poll() is None:
            killer.look()
            if time.monotonic() - began > deadline_s:
                verdict.wrong.append(f"stands still: {_stacks(folder)}")
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                for pid in _processes(folder).values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                job.wait()
            time.sleep(_POLL_S)
    killer.killed += case.lost
    verdict.killed, verdict.seconds = killer.killed, time.monotonic() - began
    verdict.output = (folder / "output").read_text(errors="replace")
    if not verdict.wrong:
        verdict.wrong = _judge(case, data, folder, job.returncode, verdict.output, killer.killed)
    return verdict


def _train_options(case: Case, data: Path) -> list[str]:
    options = ["train", str(data / "train"), "--epochs", str(case.epochs), "--batch-size", "4"]
    options += ["--image-size", "32", "--workers", "1", "--seed", "3"]
    options += ["--model", "tests.faults.named_weights:make"]
    options += ["--callback", "tests.faults.named_weights:Witness", "--optimizer", "sgd"]
    options += ["--momentum", "0", "--weight-decay", "0", "--lr", "1", "--lr-schedule", "constant"]
    options += ["--fault-tolerance", "shrink", "-n", str(case.ranks), "--backend", case.backend]
    options += ["--exchange", case.exchange, "--accumulate", str(case.accumulate)]
    options += ["--trace", "trace.jsonl", "--report", "report.json", "--save", "saved.pt"]
    options += ["--val", str(data / "val")] if case.val else []
    options += ["--spares", str(case.spares)] if case.spares else []
    options += ["--pretend-nodes", str(case.nodes)] if case.nodes > 1 else []
    options += ["--on-loss", case.on_loss] if case.on_loss != "keep" else []
    options += ["--checkpoint", "ckpt", "--checkpoint-every", "2"] if case.checkpoint else []
    of_tests = f"tests.faults.interleavings:{case.callback}"
    options += ["--callback", of_tests] if case.callback else []
    return options


def _run_options(case: Case) -> list[str]:
    options = ["run", "-n", str(case.ranks), "--backend", case.backend, "--exchange", case.exchange]
    script = Path(__file__).with_name("named_script.py")
    return [*options, "--fault-tolerance", "shrink", str(script)]


def _processes(folder: Path) -> dict[int, int]:
    """Process of each rank that has begun."""
    paths = {}
    for path in folder.glob("process-*"):
        if (text := path.read_text()).endswith("\n"):
            paths[int(path.name.removeprefix("process-"))] = int(text)
    return paths


def _stacks(folder: Path) -> str:
    """Return where the ranks wait, if py-spy is installed."""
    said = []
    for rank, pid in sorted(_processes(folder).items()):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                ["py-spy", "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=20
            )
            (folder / f"stacks-{rank}").write_text(done.stdout)
            said.append(f"rank {rank}: {done.stdout[-400:]}")
    return " ".join(said) or "no stacks"


class _Killer:
    """Kills ranks when they have come to their steps."""

    def __init__(self, case: Case, folder: Path) -> None:
        self._left, self._folder = list(case.kills), folder
        self._due: dict[Kill, float] = {}
        self.killed: list[int] = []

    def look(self) -> None:
        """Kill those that are due."""
        now = time.monotonic()
        for kill in tuple(self._left):
            if kill not in self._due and self._steps(kill.rank) >= kill.step:
                self._due[kill] = now + kill.later_s
            if kill in self._due and now >= self._due[kill]:
                self._left.remove(kill)
                with contextlib.suppress(ProcessLookupError, KeyError):
                    os.kill(_processes(self._folder)[kill.rank], signal.SIGKILL)
                    self.killed.append(kill.rank)

    def _steps(self, rank: int) -> int:
        """Finished steps of the job's life, as the rank counts them; -1 before it has begun."""
        try:
            with open(self._folder / f"steps-{rank}", "rb") as file:
                file.seek(-STEP.size, os.SEEK_END)
                return int(STEP.unpack(file.read(STEP.size))[0])
        except (OSError, ValueError):
            return 0 if (self._folder / f"process-{rank}").exists() else -1


# The judgement


Weights = npt.NDArray[np.float64]
"""Shape (steps, samples)."""


def _judge(
    case: Case, data: Path, folder: Path, code: int, output: str, killed: Sequence[int]
) -> list[str]:
    if code:
        said = [line for line in output.splitlines() if line.strip()][-1:]
        return [f"exit code {code}: {' '.join(said)[-300:]}"]
    if case.script:
        return _judge_script(case, folder, killed)
    wrong = _lost_alone(folder, killed)
    # On a busy machine a kill may come when its rank has done all that it had to do.
    killed = [rank for rank in killed if rank in _lost(folder)]
    last = case.epochs - 1
    copies = {
        int(path.name.rsplit("-", 1)[1]): np.frombuffer(path.read_bytes()).reshape(STEPS, SAMPLES)
        for path in folder.glob(f"weights-{last}-*")
    }
    living = {rank: weights for rank, weights in copies.items() if rank not in killed}
    if not living:
        return ["no rank that was not killed has come to the end"]
    if case.alike and len({weights.tobytes() for weights in living.values()}) > 1:
        wrong.append(f"ranks {sorted(living)} have different weights")
    ledger = _ledger(folder)
    rates = _rates(folder, living)
    if not case.alike:
        _forget_unmerged(folder, killed, ledger)
    for place, weights in _every_copy(case, folder, living):
        complaints = _compare(case, weights, ledger, rates, folder=folder)
        wrong += [f"{place}: {each}" for each in complaints]
    wrong += _held_out(folder, killed, case)
    wrong += _checked(folder, data)
    if case.checkpoint:
        wrong += _checkpoint(case, folder, ledger, rates)
    return list(dict.fromkeys(wrong))


def _every_copy(
    case: Case, folder: Path, living: Mapping[int, Weights]
) -> list[tuple[str, Weights]]:
    """The weights to be judged: of all ranks where they are alike, else the mean
    of those that are left, and the file that --save has written."""
    saved = _saved(folder)
    if case.alike:
        return [("saved", saved), *((f"rank {rank}", each) for rank, each in living.items())]
    return [("saved", saved), ("mean of ranks", np.mean(list(living.values()), 0))]


def _forget_unmerged(
    folder: Path, killed: Sequence[int], ledger: dict[int, dict[int, list[int]]]
) -> None:
    """Leave out, of the lines of ranks that were lost, the samples that no weights have, if one of
    the ranks was lost after the end of the epoch: where ranks have weights of their own, its own
    may be lost with it, and those that it had merged of a rank lost before."""
    lines = [json.loads(text) for text in (folder / "trace.jsonl").read_text().splitlines()]
    saved = _saved(folder)
    for epoch, steps in ledger.items():
        end = max(line["step"] for line in lines if line["epoch"] == epoch)
        own = [line for line in lines if line["epoch"] == epoch and line["rank"] in killed]
        if any(line["step"] == end for line in own):
            for line in own:
                gone = [each for each in line["samples"] if not saved[line["update"], each]]
                kept = Counter(steps[line["update"]]) - Counter(gone)
                steps[line["update"]] = list(kept.elements())
                _EXEMPT.setdefault((str(folder), epoch), set()).update(gone)


_EXEMPT: Final[dict[tuple[str, int], set[int]]] = {}
"""Samples of an epoch that only ranks had which were lost after it."""


def _saved(folder: Path) -> Weights:
    import torch

    state = torch.load(folder / "saved.pt")
    return np.stack([state[f"rows.{k}"].double().numpy() for k in range(STEPS)])


def _judge_script(case: Case, folder: Path, killed: Sequence[int]) -> list[str]:
    """All survivors say one metric and have the same weights, which hold each sample once."""
    wrong = []
    for epoch in range(case.epochs):
        said = {
            int(path.name.rsplit("-", 1)[1]): json.loads(path.read_text())
            for path in folder.glob(f"epoch-{epoch}-*")
        }
        said = {rank: each for rank, each in said.items() if rank not in killed}
        if not said:
            wrong.append(f"epoch {epoch}: no survivor has finished it")
            continue
        metrics = {rank: each["metric"] for rank, each in said.items()}
        if len(set(metrics.values())) > 1:
            wrong.append(f"epoch {epoch}: survivors say {metrics}")
        if len({tuple(each["weights"]) for each in said.values()}) > 1:
            wrong.append(f"epoch {epoch}: survivors have different weights")
        for rank, each in said.items():
            row = np.abs(np.array(each["weights"]).reshape(case.epochs, SAMPLES)[epoch])
            missing = np.flatnonzero(row == 0).tolist()
            if missing:
                wrong.append(f"epoch {epoch}, rank {rank}: {missing} never in the weights")
            # Batches of 6 that a loss has made larger or smaller: twice would be twice that.
            usual = np.median(row)
            if row.max() > 1.9 * usual and np.count_nonzero(row > 1.9 * usual) > 8:
                wrong.append(f"epoch {epoch}, rank {rank}: weights of {usual:.3g} to {row.max()}")
    return wrong


def _ledger(folder: Path) -> dict[int, dict[int, list[int]]]:
    """Samples by epoch and optimizer step, as the trace says."""
    by_epoch: dict[int, dict[int, list[int]]] = {}
    for text in (folder / "trace.jsonl").read_text().splitlines():
        line = json.loads(text)
        steps = by_epoch.setdefault(line["epoch"], {})
        steps.setdefault(line["update"], []).extend(line["samples"])
    return by_epoch


def _rates(folder: Path, living: Mapping[int, Any]) -> dict[int, float]:
    """Learning rate of each step, as the ranks saw it."""
    rates: dict[int, float] = {}
    for rank in living:
        rates |= {
            step - 1: rate for step, rate in STEP.iter_unpack(_bytes(folder / f"steps-{rank}"))
        }
    return rates


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _compare(
    case: Case,
    weights: Weights,
    ledger: Mapping[int, Mapping[int, Sequence[int]]],
    rates: Mapping[int, float],
    until: int | None = None,
    folder: Path | None = None,
) -> list[str]:
    """Compare the samples that the weights name with the ledger, and with once in an epoch.
    Only steps before `until` are compared with the ledger, and none with once in an epoch."""
    wrong = []
    moved = np.abs(weights)
    named = {step: np.flatnonzero(row).tolist() for step, row in enumerate(moved) if row.any()}
    whole = until is None
    for epoch, steps in ledger.items():
        total: Counter[int] = Counter()
        for update, samples in steps.items():
            if until is not None and update >= until:
                continue
            traced = Counter(samples)
            seen = Counter(named.pop(update, []))
            total += seen
            if seen != traced:
                less, more = sorted((traced - seen).elements()), sorted((seen - traced).elements())
                wrong.append(
                    f"step {update} of epoch {epoch}: ledger names {len(traced)}, weights "
                    f"{len(seen)}; not in the weights {less}, not in the ledger {more}"
                )
            wrong += _even(case, moved[update], update, rates)
        gone = _EXEMPT.get((str(folder), epoch), set())
        if whole and total != Counter(set(range(SAMPLES)) - gone):
            lost = sorted(set(range(SAMPLES)) - gone - set(total))
            twice = sorted(sample for sample, times in total.items() if times > 1)
            wrong.append(f"epoch {epoch}: {lost} never, {twice} more than once in the weights")
    if named and whole:
        wrong.append(f"steps that the ledger does not have: {named}")
    if whole and sorted(ledger) != list(range(case.epochs)):
        wrong.append(f"the ledger has epochs {sorted(ledger)}")
    return wrong


def _even(
    case: Case, row: npt.NDArray[np.float64], update: int, rates: Mapping[int, float]
) -> list[str]:
    """Find samples that count other than the others of their step, and a whole step that counts
    other than once. Momentum of rounds and ranks of different weights change the amounts."""
    amounts = row[row > 0]
    if not case.alike or not len(amounts) or "diloco" in case.exchange:
        return []
    wrong = []
    uneven = amounts.max() / amounts.min()
    # Compressors round to a share of the largest entry of a group.
    rough = 1.3 if "+" in case.exchange else 1.001
    if uneven > rough:
        wrong.append(f"step {update}: samples count {amounts.min():.4g} to {amounts.max():.4g}")
    if update in rates and not case.exchange.startswith("local-sgd"):
        share = amounts.sum() / rates[update]
        if not 1 / rough < share < rough:
            wrong.append(f"step {update}: the mean counts {share:.4f} times")
    return wrong


def _lost(folder: Path) -> set[int]:
    """The ranks that the job has lost, as its report says."""
    report = json.loads((folder / "report.json").read_text())
    return {rank for each in report["losses"] for rank in each["ranks"]}


def _lost_alone(folder: Path, killed: Sequence[int]) -> list[str]:
    """No rank is lost by itself."""
    others = _lost(folder) - set(killed)
    return [f"ranks {sorted(others)} were lost, and nobody has killed them"] if others else []


def _held_out(folder: Path, killed: Sequence[int], case: Case) -> list[str]:
    """Survivors say one held-out loss in each epoch, the report's."""
    wrong = []
    report = json.loads((folder / "report.json").read_text())
    for epoch in range(case.epochs):
        said = {
            path.read_text()
            for path in folder.glob(f"held-out-{epoch}-*")
            if int(path.name.rsplit("-", 1)[1]) not in killed
        }
        traced = repr(report["epochs"][epoch]["metrics"].get("loss"))
        if said and said != {traced}:
            wrong.append(f"held-out loss of epoch {epoch}: ranks {sorted(said)}, report {traced}")
    return wrong


def _checked(folder: Path, data: Path) -> list[str]:
    """`dlio ledger` finds the trace whole."""
    done = subprocess.run(
        [sys.executable, "-m", "dlio.cli", "ledger", "trace.jsonl", str(data / "train")],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    return [f"dlio ledger: {(done.stdout + done.stderr)[-300:]}"] if done.returncode else []


def _checkpoint(
    case: Case,
    folder: Path,
    ledger: Mapping[int, Mapping[int, Sequence[int]]],
    rates: Mapping[int, float],
) -> list[str]:
    """The newest checkpoint's weights name the samples of the steps before it."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    paths = sorted((folder / "ckpt").glob("step-*"))
    if not paths:
        return ["no checkpoint was written"]
    dcp_to_torch_save(str(paths[-1]), str(folder / "plain.pt"))
    state = torch.load(folder / "plain.pt", weights_only=False)
    named = {
        int(match[1]): value.double().numpy()
        for name, value in _flat(state)
        if (match := re.search(r"(?:rank0|all)/model/rows\.(\d+)$", name))
    }
    until = int(paths[-1].name.removeprefix("step-"))
    if len(named) != STEPS:
        return [f"the checkpoint has {len(named)} rows: {[n for n, _ in _flat(state)][:5]}"]
    if not case.alike:
        names = {name for name, _ in _flat(state)}
        return _without_weights(paths[-1], names)
    weights = np.stack([named[k] for k in range(STEPS)])
    return [f"checkpoint: {each}" for each in _compare(case, weights, ledger, rates, until)]


def _without_weights(path: Path, names: Collection[str]) -> list[str]:
    """Each rank that has written a checkpoint has its own weights in it."""
    ranks = json.loads((path / "about.json").read_text())["ranks"]
    wanted = [f"rank{rank}/model/rows.{k}" for rank in range(ranks) for k in range(STEPS)]
    missing = [name for name in wanted if name not in names]
    return [f"checkpoint: {len(missing)} tensors are missing: {missing[:1]}"] if missing else []


def _flat(state: object, at: str = "") -> list[tuple[str, Any]]:
    if isinstance(state, dict):
        return [
            each
            for key, value in state.items()
            for each in _flat(value, f"{at}/{key}" if at else str(key))
        ]
    return [(at, state)] if hasattr(state, "shape") else []


# Drawing


EXCHANGES: Final = (
    "allreduce",
    "allreduce+onebit",
    "allreduce+int8",
    "allreduce+bf16",
    "allreduce+adaptive",
    "tree",
    "parameter-server",
    "hierarchical",
    "hierarchical+onebit",
    "local-sgd(3)",
    "local-sgd(3)+int8",
    "diloco(3)",
    "gossip",
    "gossip+int8",
    "noloco(2)",
    "asgd",
    "asgd+bf16",
)


def draw(seed: int) -> Case:
    """Draw a job: the exchange, the features next to it, and who is lost when."""
    generator = random.Random(seed)
    exchange = generator.choice(EXCHANGES)
    if generator.random() < 0.12:
        return _draw_script(generator)
    backend = generator.choice(["mpi", "mpi", "torch"])
    ranks = generator.choice([3, 3, 4])
    spares = generator.choice([0, 0, 1, 2]) if backend == "mpi" else 0
    accumulate = generator.choice([1, 1, 2])
    epochs = 2
    # Batches of 4 samples a rank.
    in_epoch = -(-SAMPLES // (4 * ranks * accumulate))
    kills = []
    lost = generator.sample(range(ranks), generator.choice([1, 2, 2]))
    # A rank that is lost before training ends the job.
    first = generator.randrange(1, epochs * in_epoch)
    for number, rank in enumerate(lost):
        near = generator.random() < 0.5
        step = first if near or not number else generator.randrange(1, epochs * in_epoch)
        kills.append(Kill(rank, step, round(generator.uniform(0.0, 0.12), 3)))
    return Case(
        exchange=exchange,
        backend=backend,
        ranks=ranks,
        kills=tuple(kills),
        spares=spares,
        nodes=2 if exchange.startswith("hierarchical") else generator.choice([1, 1, 1, 2]),
        accumulate=accumulate,
        epochs=epochs,
        val=generator.random() < 0.6,
        checkpoint=generator.random() < 0.4,
        on_loss=generator.choice(["keep", "keep", "keep", "shrink"]),
    )


def _draw_script(generator: random.Random) -> Case:
    exchange = generator.choice(["allreduce", "allreduce", "tree", "allreduce+int8"])
    lost = generator.sample(range(3), generator.choice([1, 2]))
    kills = [Kill(k, generator.randrange(1, 17), generator.uniform(0.0, 0.15)) for k in lost]
    backend = generator.choice(["mpi", "torch"])
    return Case(exchange=exchange, backend=backend, kills=tuple(kills), script=True, epochs=2)


def main(argv: Sequence[str]) -> None:
    """Run the jobs of some seeds, FIRST COUNT FOLDER, and append their verdicts to FOLDER."""
    first, count, folder = int(argv[0]), int(argv[1]), Path(argv[2])
    data = folder / "data"
    if not data.exists():
        draw_pictures(data)
    warm = WarmPython()
    sys.executable = warm.executable
    warm.start()
    warm.wait()
    for seed in range(first, first + count):
        verdict = run_case(draw(seed), data, folder / f"job-{seed}", sources=argv[3])
        with open(folder / "verdicts.jsonl", "a") as file:
            file.write(f"{json.dumps({'seed': seed})[:-1]}, {verdict.line()[1:]}\n")
        print(seed, verdict.case.name, round(verdict.seconds), verdict.wrong or "ok", flush=True)
    warm.close()


if __name__ == "__main__":
    main(sys.argv[1:])
