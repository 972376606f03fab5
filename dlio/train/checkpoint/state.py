"""Save the state of a run as named tensors and JSON, and restore it on any number of ranks."""

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NotRequired, TypedDict, cast

import numpy as np
import numpy.typing as npt
import torch

from dlio.errors import UsageError
from dlio.train.checkpoint_progress import FIXED
from dlio.train.feature_hooks import SavedFeature
from dlio.train.feature_spec import find_features, fixed_options
from dlio.train.names import DEFAULT_OPTIMIZER
from dlio.train.report import EpochReport
from dlio.train.worker import Worker
from dlio.util.options import as_mapping
from dlio.util.units import counted

OWED: Final = "/owed/"
"""Part of the names of error-feedback residuals in an exchange's state."""
_OF_TASK: Final = ("task", "target", "category")
"""Options of a task that cannot change when a run is resumed; those of features are added."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state of a run that some ranks have saved: a checkpoint, or a copy in memory."""

    path: str
    """Where it is, for errors."""
    ranks: int
    """Number of ranks that saved it."""
    about: Mapping[str, Any]
    """A `RunState`."""
    is_of_one_step: bool = field(default=True, kw_only=True)
    """True if all ranks have saved it after the same step."""
    tensors: Mapping[str, torch.Tensor] = field(
        default_factory=dict, kw_only=True, compare=False, repr=False
    )
    """Those that are in this rank's memory."""

    def read(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors whose names begin with `prefix`, without it. Raises SourceError."""
        return part_of(self.tensors, prefix)


class RunState(TypedDict):
    """State of a run apart from tensors, as JSON types."""

    model: str
    optimizer: str
    image_size: int
    seed: int
    of_task: NotRequired[dict[str, Any]]
    """Options of `_OF_TASK` and of features; missing in files of earlier versions."""
    exchange: str
    samples: int
    """Samples of the data set."""
    global_batch: int
    updates: int
    """Optimizer steps."""
    loader: dict[str, Any]
    """The loader's state_dict."""
    batches: NotRequired[int]
    """Batches of its epoch that were taken; missing in files of earlier versions."""
    scaler: dict[str, Any]
    """The state_dict of torch's GradScaler."""
    left_out: int
    epochs: list[dict[str, Any]]
    """Fields of the finished epochs' EpochReports."""
    planned_epochs: NotRequired[int]
    """Epochs that the run was to have; missing in files of earlier versions."""


def tensors_of(run: Worker) -> dict[str, torch.Tensor]:
    """Return this rank's tensors: `all/...` if equal on all ranks, `rank<number>/...` otherwise.

    Call it between two steps. Layers that ranks share are whole in it; collective if there are any.
    """
    whole = run.layout.whole
    mine = f"rank{run.comm.rank}/"
    trained = "all/" if run.exchange.alike else mine
    tensors: dict[str, torch.Tensor] = {}
    parameters = dict(run.model.named_parameters())
    # Tied weights have several names: under the second one, too, they are not each rank's own.
    names = {name for name, _ in run.model.named_parameters(remove_duplicate=False)}
    for name, value in run.model.state_dict().items():
        tensors[f"{trained if name in names else mine}model/{name}"] = whole(name, value)
    for name, parameter in parameters.items():
        for key, value in run.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{trained}optimizer/{name}/{key}"] = whole(name, value)
    for key, value in run.exchange.state().items():
        tensors[f"{mine}exchange/{key}"] = value
    for prefix, hooks in run.features.by_prefix.items():
        for whose, part in (
            (trained, hooks.weights()),
            ("all/", hooks.shared_tensors()),
            (mine, hooks.own_tensors()),
        ):
            tensors |= {f"{whose}{prefix}/{name}": value for name, value in part.items()}
    tensors[f"{mine}sums"] = run.sums
    scaler = run.precision.scaler.state_dict()
    # Ranks with different weights may leave out different steps.
    tensors[f"{mine}steps"] = torch.tensor(
        [run.left_out, scaler.get("scale", 1.0), scaler.get("_growth_tracker", 0)],
        dtype=torch.float64,
    )
    tensors[f"{mine}random"] = torch.get_rng_state()
    if run.device.type == "cuda":
        tensors[f"{mine}random-cuda"] = torch.cuda.get_rng_state(run.device)
    return tensors


def changed_by_updates(run: Worker, tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of those of `tensors_of` that change in an optimizer step and at no other
    time: none where ranks exchange weights, which happens at any time."""
    if not run.exchange.alike:
        return frozenset()
    parts = tuple(f"all/{part}" for part in _parts_of_weights(run))
    return frozenset(name for name in tensors if name.startswith(parts))


def _parts_of_weights(run: Worker) -> tuple[str, ...]:
    """Return the first parts of the names of tensors that are as the weights: equal on ranks whose
    models are, and changed by optimizer steps alone."""
    like = [f"{name}/" for name, hooks in run.features.by_prefix.items() if hooks.has_weights]
    return ("model/", "optimizer/", *like)


def about(run: Worker) -> RunState:
    """Return the rest of the state as JSON types; equal on all ranks."""
    loader, options = run.assigner.state(), as_mapping(run.config)
    state: RunState = {
        "model": run.config.model.model,
        "optimizer": run.config.optimizer.optimizer or DEFAULT_OPTIMIZER,
        "image_size": run.config.model.image_size,
        "seed": run.config.data.seed,
        "of_task": {name: _plain(options.get(name)) for name in (*_OF_TASK, *fixed_options())},
        "exchange": run.config.ranks.exchange,
        "samples": len(run.loader.data),
        "global_batch": run.global_batch,
        "updates": run.updates,
        "loader": loader,
        "batches": run.assigner.step + 1 if loader["position"] else 0,
        "scaler": run.precision.scaler.state_dict(),
        "left_out": run.left_out,
        "epochs": [report.to_dict() for report in run.history],
        "planned_epochs": run.config.optimizer.epochs,
    }
    facts = {prefix: hooks.facts() for prefix, hooks in run.features.by_prefix.items()}
    of_features = {prefix: each for prefix, each in facts.items() if each is not None}
    return cast(RunState, {**state, **of_features})


def restore(run: Worker, checkpoint: SavedState) -> None:
    """Continue a run from a checkpoint. Collective.

    On the same number of ranks the run continues exactly. On another number, the weights and the
    optimizer's state become the mean over the saved ranks, whose copies are equal anyway if the
    exchange averages gradients.

    Raises UsageError if the checkpoint belongs to a different run, SourceError if it is damaged.
    """
    _check(run, checkpoint)
    ranks, rank = run.comm.size, run.comm.rank
    about, saved = cast(RunState, checkpoint.about), checkpoint.ranks
    same_exchange = about["exchange"] == run.config.ranks.exchange
    for feature, options in run.config.each_feature():
        same_exchange = same_exchange and feature.continues_exchange(options, checkpoint.about)
    same = saved == ranks and same_exchange and checkpoint.is_of_one_step
    mine = (
        checkpoint.read(f"rank{rank}/")
        if same
        else mean_of_ranks(checkpoint, _parts_of_weights(run))
    )
    tensors = {**checkpoint.read("all/"), **mine}
    facts: Mapping[str, Any] = checkpoint.about
    for prefix, hooks in run.features.by_prefix.items():
        hooks.restore_shape(run, facts.get(prefix))
    _restore_model(run, checkpoint.path, part_of(tensors, "model/"))
    _restore_optimizer(run, part_of(tensors, "optimizer/"))
    if same:
        run.exchange.load_state(part_of(tensors, "exchange/"))
        torch.set_rng_state(tensors["random"])
        if run.device.type == "cuda" and "random-cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random-cuda"], run.device)
    else:
        of_rank = about["updates"] * 1_000_003 + run.layout.data.rank
        torch.manual_seed((run.config.data.seed + of_rank) % 2**63)
        run.exchange.load_state(_residuals(checkpoint, rank, ranks) if same_exchange else {})
    for prefix, hooks in run.features.by_prefix.items():
        taken_over = partial(_taken_over, checkpoint, rank, ranks, f"{prefix}/")
        part = part_of(tensors, f"{prefix}/")
        hooks.restore(SavedFeature(facts.get(prefix), part, taken_over))
    run.left_out, scaler = about["left_out"], about["scaler"]
    if same:
        left_out, scale, growth = tensors["steps"].tolist()
        run.left_out = int(left_out)
        scaler = {**scaler, "scale": scale, "_growth_tracker": int(growth)} if scaler else scaler
    run.precision.scaler.load_state_dict(scaler)
    run.loader.load_state_dict(about["loader"])
    run.assigner.earlier = about.get("batches", 0)
    run.epoch_number, run.position = about["loader"]["epoch"], about["loader"]["position"]
    run.updates = about["updates"]
    sums = torch.zeros(3, dtype=torch.float64)
    for each in _taken_over(checkpoint, rank, ranks, "sums"):
        sums += each
    run.sums.copy_(sums)
    run.history = [EpochReport.from_dict(report) for report in about["epochs"]]


def _restore_model(run: Worker, path: str, model: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        own = run.model.state_dict()
        model = run.layout.part_state(model)
        _check_shapes(path, own, model)
        for name, value in own.items():
            value.copy_(model[name])


def _restore_optimizer(run: Worker, state: Mapping[str, torch.Tensor]) -> None:
    """Restore the optimizer's state; `state` has names `parameter/key`."""
    parameters = dict(run.model.named_parameters())
    for name, value in state.items():
        parameter_name, _, key = name.rpartition("/")
        parameter = parameters[parameter_name]
        value = run.layout.part(parameter_name, value)
        if value.shape == parameter.shape and value.ndim:
            own = torch.empty_like(parameter).copy_(value)
        else:
            own = value.clone()  # It would keep all of a copy in memory alive.
        run.optimizer.state[parameter][key] = own


def mean_of_ranks(checkpoint: SavedState, parts: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Mean over the saved ranks of those of their own tensors whose names begin with `parts`."""
    saved = checkpoint.ranks
    total: dict[str, torch.Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    for rank in range(saved):
        for name, value in checkpoint.read(f"rank{rank}/").items():
            if not name.startswith(parts):
                continue
            kinds[name] = value.dtype
            if not value.is_floating_point():
                total.setdefault(name, value)
            elif name in total:
                total[name] += value.double() / saved
            else:
                total[name] = value.double() / saved
    return {name: value.to(kinds[name]) for name, value in total.items()}


def _ranks_taken_over(checkpoint: SavedState, rank: int, ranks: int) -> range:
    """Return the saved ranks whose parts this rank continues; each one goes to exactly one rank."""
    return range(rank, checkpoint.ranks, ranks)


def _residuals(checkpoint: SavedState, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Sum of the error-feedback residuals that this rank takes over, so that none is lost."""
    total: dict[str, torch.Tensor] = {}
    for each in _ranks_taken_over(checkpoint, rank, ranks):
        for name, value in checkpoint.read(f"rank{each}/exchange/").items():
            if OWED in name:
                total[name] = total[name] + value if name in total else value
    return total


def _taken_over(
    checkpoint: SavedState, rank: int, ranks: int, prefix: str, name: str = ""
) -> Iterator[torch.Tensor]:
    """Yield a tensor of each saved rank whose part this rank continues."""
    for each in _ranks_taken_over(checkpoint, rank, ranks):
        yield checkpoint.read(f"rank{each}/{prefix}{name}")[""]


def _check(run: Worker, checkpoint: SavedState) -> None:
    """Raise UsageError if the checkpoint was written with other options or other data."""
    path, about = checkpoint.path, cast(RunState, checkpoint.about)
    options = as_mapping(run.config)
    saved = {name: about[name] for name in FIXED} | about.get("of_task", {})
    for name, value in saved.items():
        if value != _plain(options.get(name)):
            raise UsageError(
                f"--resume: {path} was written with --{name.replace('_', '-')} "
                f"{value}, this run has {options.get(name)}; use the former value, or "
                "name another --checkpoint folder"
            )
    labels = run.config.labels()
    for feature in find_features():
        feature.check_saved(checkpoint.about, path, feature.name in labels)
    if about["samples"] != len(run.loader.data):
        raise UsageError(
            f"--resume: {path} belongs to a data set of {counted(about['samples'], 'sample')}, "
            f"{run.config.data.source} has {len(run.loader.data)}"
        )


def _plain(value: object) -> object:
    """Return a value as JSON returns it."""
    return list(value) if isinstance(value, tuple) else value


def _check_shapes(
    path: str, own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
) -> None:
    """Raise UsageError if the checkpoint belongs to another model."""
    for name, value in own.items():
        if name not in given:
            raise UsageError(f"--resume: {path} lacks {name}: it belongs to another model")
        if given[name].shape != value.shape:
            raise UsageError(
                f"--resume: {path} has {name} of shape {tuple(given[name].shape)}, the model's is "
                f"{tuple(value.shape)}: it belongs to another model"
            )


def part_of(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


TensorPlaces = list[tuple[str, str, list[int], int, int]]
"""Name, type, shape, position and bytes of tensors that lie in one piece of memory."""


def places_of(tensors: Mapping[str, torch.Tensor]) -> tuple[TensorPlaces, int]:
    """Return places for tensors, as JSON types, and the bytes of all."""
    places: TensorPlaces = []
    at = 0
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        places.append((name, kind, list(tensor.shape), at, tensor.nbytes))
        at += -(-tensor.nbytes // 64) * 64
    return places, at


@torch.no_grad()
def copy_to(memory: Sized, places: TensorPlaces, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors to their places in a buffer."""
    flat = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0)
    for (_, _, shape, first, size), tensor in zip(places, tensors.values(), strict=True):
        if size:
            flat[first : first + size].view(tensor.dtype).view(shape).copy_(tensor)


def tensors_at(places: TensorPlaces, memory: npt.NDArray[np.uint8]) -> dict[str, torch.Tensor]:
    """Return the tensors that lie in an array, by name; they share its memory."""
    return {
        name: torch.from_numpy(memory[first : first + size]).view(getattr(torch, kind)).view(shape)
        for name, kind, shape, first, size in places
    }
