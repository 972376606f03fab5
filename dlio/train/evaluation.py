"""Evaluate saved weights on a data set, on any number of ranks (`dlio eval`)."""

import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from dlio.comm import world
from dlio.errors import UsageError
from dlio.train.array_fields import is_table
from dlio.train.compute_device import Precision, channels_last, choose_device
from dlio.train.config import TrainConfig
from dlio.train.evaluator import Evaluator
from dlio.train.feature_hooks import layout_of
from dlio.train.tasks.metrics import label, show_metric
from dlio.train.tasks.registry import make_task, resolve_config
from dlio.train.train_options import ModelOptions
from dlio.train.training_data import RunData
from dlio.train.weights import read_weights
from dlio.util.cores import available_cores
from dlio.util.heap import keep_freed_memory
from dlio.util.units import counted


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Metrics of one model on one data set."""

    source: str
    weights: str
    task: str
    model: str
    samples: int
    ranks: int
    seconds: float
    """Time of the evaluation, with reading the data."""
    metrics: dict[str, float | None]
    watch: str
    """Name of the metric that stands for the task."""

    def sentence(self) -> str:
        """Return the metrics in words."""
        shown = [self.watch, *(name for name in self.metrics if name != self.watch)]
        each = ", ".join(f"{label(name)} {show_metric(name, self.metrics[name])}" for name in shown)
        return (
            f"{counted(self.samples, 'sample')} on {counted(self.ranks, 'rank')} in "
            f"{self.seconds:.1f} s: {each}"
        )


def evaluate(config: TrainConfig) -> EvaluationReport:
    """Evaluate the weights of a configuration on its source. Collective.

    The metrics do not depend on the number of ranks, but for the rounding of the model's outputs.

    Raises UsageError for weights that are not those of the model.
    """
    weights = config.model.weights
    assert weights is not None
    state = read_weights(weights)
    comm = world()
    with ExitStack() as stack:
        layout = stack.enter_context(layout_of(config, comm))
        sources = RunData(config, layout)
        options = config.data
        opened = sources.open(options.source, options.tiers, False, options.split)
        data = stack.enter_context(opened)
        config = resolve_config(config, data, layout.schema(data))
        if config.model.task == "regress" and not is_table(data.reader.schema):
            raise UsageError(
                "dlio eval does not know the units of a network that predicts numbers of images "
                "or arrays: give `dlio train` the data as --val"
            )
        device = choose_device(config.model.device, comm)
        loader = stack.enter_context(sources.loader(data, False, device))
        data.mount(layout.data, config.ranks.pretend_nodes)
        torch.set_num_threads(max(1, available_cores() // comm.size))
        keep_freed_memory()
        task = make_task(config, data, comm, layout.schema(data))
        model = channels_last(task.make_model()).to(device)
        _check_state(config.model, state, model.state_dict())
        layout.cut_layers(model)
        state = layout.part_state(state)
        precision = Precision(config.model.precision, device)
        evaluator = Evaluator(model, task, loader, precision, layout)
        began = time.perf_counter()
        metrics = evaluator.metrics(state, device)
        comm.barrier()
        return EvaluationReport(
            config.data.source,
            weights,
            task.name,
            config.model.model,
            len(data),
            comm.size,
            time.perf_counter() - began,
            metrics,
            task.objective.watch,
        )


def _check_state(
    options: ModelOptions, given: dict[str, torch.Tensor], own: dict[str, torch.Tensor]
) -> None:
    """Raise UsageError if the weights are not those of the model."""
    for name, value in own.items():
        if name not in given:
            raise UsageError(
                f"--weights {options.weights}: lacks {name}: give the --model that it was saved "
                "with"
            )
        if given[name].shape != value.shape:
            raise UsageError(
                f"--weights {options.weights}: {name} has shape {tuple(given[name].shape)}, and "
                f"--model {options.model} on these data {tuple(value.shape)}: give the --model and "
                "the classes that it was saved with"
            )
    extra = [name for name in given if name not in own]
    if extra:
        raise UsageError(
            f"--weights {options.weights}: has {extra[0]}, which --model {options.model} lacks: "
            "give the --model that it was saved with"
        )
