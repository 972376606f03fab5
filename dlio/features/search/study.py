"""The folder of a search: its lock, its journal and the folders of its trials.

    STUDY/
        search.json         options that cannot change when the search goes on
        journal.log         Optuna's journal: parameters and results of all trials
        lock                held by the searcher
        tiers/              the staged copy, without --tiers
        trials/0007/        log, checkpoint/ while the trial runs, weights.pt of the best

The journal is Optuna's own: `optuna.load_study` and optuna-dashboard read it.
"""

import fcntl
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from dlio.errors import UsageError
from dlio.features.search.objectives import Objective
from dlio.features.search.search_space import Point
from dlio.features.search.study_journal import StudyJournal
from dlio.features.search.successive_halving import TrialCourse
from dlio.util.closable import Closable
from dlio.util.folders import remove_all_marked
from dlio.util.input_files import MOST_SETTINGS, as_usage, read_json
from dlio.util.json_output import json_text
from dlio.util.user_folders import make_folders
from dlio.util.whole_files import open_own, remove_file, take_lock, unwritable, write_json

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

NAME: Final = "search"
"""Name of the study in its journal."""
_JOURNAL: Final = "journal.log"
_EPOCH: Final = "epoch "
_NOTE: Final = "note"
_STAGED: Final = "staged"


@dataclass(frozen=True, slots=True)
class TrialEpoch:
    """Results of one epoch of a trial."""

    values: tuple[float | None, ...]
    """Of the objectives."""
    source_bytes: int = 0
    """Payload bytes that were read from the source."""


@dataclass(slots=True)
class TrialRecord:
    """One trial as the journal knows it."""

    number: int
    point: Point
    state: str
    """running, complete, pruned or failed."""
    epochs: list[TrialEpoch] = field(default_factory=list)
    note: str = ""
    """Reason of a failure."""

    @property
    def has_ended(self) -> bool:
        """True if it does not go on."""
        return self.state != "running"

    @property
    def values(self) -> tuple[float | None, ...]:
        """Values of the objectives after the last epoch; empty before the first one."""
        return self.epochs[-1].values if self.epochs else ()

    def nan_after(self, objectives: Sequence[Objective]) -> str:
        """Say which objectives are not a number after the last epoch; nothing if all are."""
        names = [
            objective.name
            for objective, value in zip(objectives, self.values, strict=False)
            if value is not None and math.isnan(value)
        ]
        stopped = f"stopped after epoch {len(self.epochs)}"
        return f"{' and '.join(names)} is nan: {stopped}" if names else ""

    def course(self, objective: Objective) -> TrialCourse:
        """Return the course of the trial by an objective, the first one of the search."""
        goodness = [objective.goodness(epoch.values[0]) for epoch in self.epochs]
        return TrialCourse(goodness, self.has_ended)


class Study(Closable):
    """A search's folder, held by this process until `close`.

    A search goes on with the options in `fixed`; others are refused. It keeps the values in `first`
    that it has begun with.

    Raises UsageError if another searcher holds the folder, if it belongs to another search, or
    cannot be written.
    """

    def __init__(
        self,
        folder: str,
        objectives: Sequence[Objective],
        fixed: Mapping[str, object],
        first: Mapping[str, int],
    ) -> None:
        self.folder, self.objectives = folder, objectives
        try:
            os.close(make_folders(os.path.join(folder, "trials")))
            self._lock = open_own(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise unwritable(f"--study {folder}", error) from error
        try:
            if not take_lock(self._lock, fcntl.LOCK_EX):
                raise UsageError(
                    f"--study {folder}: another dlio search is at work there: wait for its end, or "
                    "name another folder"
                )
            self.first = self._check_fixed(fixed, first)
            """Values that the search has begun with."""
            path = os.path.join(folder, _JOURNAL)
            with as_usage(path, "name another --study"), ExitStack() as undo:
                self._journal = StudyJournal(path)
                undo.callback(self._journal.close)
                self.optuna_study = self._opened()
                """Optuna's study, which others may only read."""
                self.records = list(map(_record, self.frozen()))
                undo.pop_all()
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Let go of the folder."""
        self._journal.close()
        os.close(self._lock)

    @property
    def trial_source_bytes(self) -> int:
        """Bytes that trials have read from the source."""
        return sum(epoch.source_bytes for record in self.records for epoch in record.epochs)

    @property
    def staged_bytes(self) -> int:
        """Bytes that were read from the source to stage it, over all runs of the search."""
        return sum(self.optuna_study.user_attrs.get(_STAGED, []))

    def add_staged(self, count: int) -> None:
        """Note bytes that were read from the source to stage it."""
        self.optuna_study.set_user_attr(
            _STAGED, [*self.optuna_study.user_attrs.get(_STAGED, []), count]
        )

    def frozen(self, count: int | None = None) -> "list[FrozenTrial]":
        """Return the first trials, all for None, as samplers take them."""
        return self.optuna_study.get_trials(deepcopy=False)[:count]

    def add(self, trial: "FrozenTrial") -> TrialRecord:
        """Begin a trial."""
        self.optuna_study.add_trial(trial)
        record = TrialRecord(len(self.records), dict(trial.params), "running")
        self.records.append(record)
        return record

    def report(self, record: TrialRecord, number: int, epoch: TrialEpoch) -> None:
        """Note the results of a trial's epoch, from 0; one that is known already stays."""
        if number < len(record.epochs):
            return
        assert number == len(record.epochs)
        trial = self._trial(record)
        value = epoch.values[0]
        if len(self.objectives) == 1 and value is not None:
            trial.report(value, number)
        # Last: an epoch without it is trained again.
        trial.set_user_attr(f"{_EPOCH}{number}", [list(epoch.values), epoch.source_bytes])
        record.epochs.append(epoch)

    def end(self, record: TrialRecord, state: str, note: str = "") -> None:
        """End a trial: complete, pruned or failed."""
        import optuna

        values = [math.nan if each is None else each for each in record.values]
        wrong = [
            f"{objective.name} is {value}"
            for objective, value in zip(self.objectives, record.values, strict=False)
            if value is None or not math.isfinite(value)
        ]
        note = note or ", ".join(wrong)
        if state == "complete" and not all(map(math.isfinite, values)):
            state = "failed"
        if note:
            self._trial(record).set_user_attr(_NOTE, note)
        states = optuna.trial.TrialState
        if state == "complete":
            self.optuna_study.tell(record.number, values)
        else:
            self.optuna_study.tell(
                record.number, state=states.PRUNED if state == "pruned" else states.FAIL
            )
        record.state, record.note = state, note

    def best(self) -> list[TrialRecord]:
        """Return the best trial; with several objectives, all that no other one is better than."""
        if len(self.objectives) > 1:
            return [self.records[trial.number] for trial in self.optuna_study.best_trials]
        complete = [record for record in self.records if record.state == "complete"]
        if not complete:
            return []
        # Of equal ones, the first.
        return [max(complete, key=lambda each: self.objectives[0].goodness(each.values[0]))]

    def trial_folder(self, number: int) -> str:
        """Return the path of a trial's folder."""
        return os.path.abspath(os.path.join(self.folder, "trials", f"{number:04}"))

    def weights(self, number: int) -> str:
        """Return the path of a trial's weights."""
        return os.path.join(self.trial_folder(number), "weights.pt")

    def tidy(self) -> None:
        """Remove checkpoints of ended trials, and weights of all but the best."""
        best = {record.number for record in self.best()}
        for record in self.records:
            if not record.has_ended:
                continue
            remove_all_marked(os.path.join(self.trial_folder(record.number), "checkpoint"), ".lock")
            if record.number not in best:
                remove_file(self.weights(record.number))

    def _check_fixed(self, fixed: Mapping[str, object], first: Mapping[str, int]) -> dict[str, int]:
        path = os.path.join(self.folder, "search.json")
        plain = json.loads(json_text(fixed))
        try:
            with as_usage(path, "name another --study"):
                kept: Any = read_json(path, MOST_SETTINGS)
                before, begun = dict(kept["options"]), dict(kept["first"])
                if not all(type(begun.get(name, 0)) is int for name in first):
                    raise ValueError("its numbers are none")
                first = {**first, **begun}
        except FileNotFoundError:
            write_json(path, {"options": plain, "first": dict(first)})
            return dict(first)
        for name in (*plain, *before):
            if plain.get(name) != before.get(name):
                raise UsageError(
                    f"--study {self.folder} holds a search with {name} {before.get(name)}, not "
                    f"{plain.get(name)}: give the same options to go on, or name another folder"
                )
        return dict(first)

    def _opened(self) -> "optuna.Study":
        import optuna

        # There is one searcher, by the folder's lock: the journal needs none between processes.
        backend: Any = self._journal
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name=NAME,
            directions=[each.direction for each in self.objectives],
            load_if_exists=True,
        )

    def _trial(self, record: TrialRecord) -> "optuna.Trial":
        import optuna

        return optuna.trial.Trial(self.optuna_study, self.frozen()[record.number]._trial_id)


def _record(frozen: "FrozenTrial") -> TrialRecord:
    names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
    attributes: dict[str, Any] = frozen.user_attrs
    epochs: list[TrialEpoch] = []
    while (row := attributes.get(f"{_EPOCH}{len(epochs)}")) is not None:
        values = tuple(None if each is None else float(each) for each in row[0])
        epochs.append(TrialEpoch(values, int(row[1])))
    state = names.get(frozen.state.name, "running")
    note = str(attributes.get(_NOTE, ""))
    return TrialRecord(frozen.number, frozen.params, state, epochs, note)
