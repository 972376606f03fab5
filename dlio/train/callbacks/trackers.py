"""Weights & Biases and MLflow, by their own packages: options, and the figures of each epoch."""

import importlib
from dataclasses import asdict
from typing import Any

from dlio.errors import UsageError
from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.callbacks.epoch_figures import figures_of
from dlio.train.report import EpochReport


class _Tracker(Callback):
    """Sends options and figures; the first rank does, and after its loss the next one.

    Figures stand at the step of the optimizer at which their epoch ended.
    """

    package = ""

    def __init__(self) -> None:
        try:
            self._package: Any = importlib.import_module(self.package)
        except ImportError as error:
            raise UsageError(
                f"--callback {self.package}: {error}; install it: pip install {self.package}"
            ) from error
        self._open = False

    def __exit__(self, *error: object) -> None:
        if self._open:
            self._open = False
            self._end(failed=error[0] is not None)

    def begins(self, run: Run) -> None:
        if run.comm.rank == 0:
            self._begin(run)

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        if run.comm.rank == 0:
            self._begin(run)
            self._send(figures_of(report), run.updates)

    def _begin(self, run: Run) -> None:
        if not self._open:
            self._start({**asdict(run.config), "ranks": run.comm.size})
            self._open = True

    def _start(self, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def _send(self, figures: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _end(self, *, failed: bool) -> None:
        raise NotImplementedError


class WandB(_Tracker):
    """Weights & Biases: `--callback "wandb(project='imagenet')"`.

    Args:
        options: of `wandb.init`, such as `project`, `name`, `mode`.

    Raises UsageError if wandb is not installed.
    """

    package = "wandb"

    def __init__(self, **options: object) -> None:
        super().__init__()
        self._options = options

    def _start(self, options: dict[str, Any]) -> None:
        self._run = self._package.init(config=options, **self._options)

    def _send(self, figures: dict[str, float], step: int) -> None:
        self._run.log(figures, step=step)

    def _end(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow(_Tracker):
    """MLflow: `--callback "mlflow(experiment='imagenet')"`.

    Args:
        experiment: its name; None for MLflow's own choice.
        uri: of the tracking server or folder; None for MLFLOW_TRACKING_URI or its own choice.
        name: of the run.

    Raises UsageError if mlflow is not installed.
    """

    package = "mlflow"

    def __init__(
        self, experiment: str | None = None, uri: str | None = None, name: str | None = None
    ) -> None:
        super().__init__()
        self._experiment, self._uri, self._name = experiment, uri, name

    def _start(self, options: dict[str, Any]) -> None:
        if self._uri is not None:
            self._package.set_tracking_uri(self._uri)
        if self._experiment is not None:
            self._package.set_experiment(self._experiment)
        self._package.start_run(run_name=self._name)
        given = {name: value for name, value in options.items() if value not in (None, ())}
        self._package.log_params(given)

    def _send(self, figures: dict[str, float], step: int) -> None:
        self._package.log_metrics(figures, step=step)

    def _end(self, *, failed: bool) -> None:
        self._package.end_run("FAILED" if failed else "FINISHED")
