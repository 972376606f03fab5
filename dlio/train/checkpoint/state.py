"""What a run is made of, as named tensors and a few words; and back, on any number of ranks."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import torch

from dlio.errors import UsageError
from dlio.train.checkpoint.folder import StoredCheckpoint
from dlio.train.report import EpochReport
from dlio.train.worker import Worker

_OWED: Final = "/owed/"
_FIXED: Final = ("model", "optimizer", "image_size", "seed")
"""Options that a run that goes on cannot change."""


def tensors_of(run: Worker) -> dict[str, torch.Tensor]:
    """This rank's, by name: `all/...` where all ranks' are equal, `rank<number>/...` its own.

    To be called between two steps.
    """
    mine = f"rank{run.comm.rank}/"
    trained = "all/" if run.exchange.alike else mine
    tensors: dict[str, torch.Tensor] = {}
    parameters = dict(run.model.named_parameters())
    for name, value in run.model.state_dict().items():
        tensors[f"{trained if name in parameters else mine}model/{name}"] = value
    for name, parameter in parameters.items():
        for key, value in run.optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{trained}optimizer/{name}/{key}"] = value
    for key, value in run.exchange.state().items():
        tensors[f"{mine}exchange/{key}"] = value
    if run.pruner is not None:
        for key, value in run.pruner.tensors().items():
            tensors[f"{mine}pruning/{key}"] = value
    if run.skipper is not None:
        for key, value in run.skipper.state().items():
            tensors[f"{mine if key == 'seen' else 'all/'}skip/{key}"] = value
    tensors[f"{mine}sums"] = run.sums
    scaler = run.precision.scaler.state_dict()
    # Ranks with weights of their own leave out steps of their own.
    tensors[f"{mine}steps"] = torch.tensor(
        [run.left_out, scaler.get("scale", 1.0), scaler.get("_growth_tracker", 0)],
        dtype=torch.float64,
    )
    tensors[f"{mine}random"] = torch.get_rng_state()
    if run.device.type == "cuda":
        tensors[f"{mine}random-cuda"] = torch.cuda.get_rng_state(run.device)
    return tensors


def about(run: Worker) -> dict[str, Any]:
    """The rest, of JSON's types; the same on all ranks."""
    config = run.config
    return {
        **{name: getattr(config, name) for name in _FIXED},
        "exchange": config.exchange,
        "samples": len(run.loader.data),
        "global_batch": run.global_batch,
        "updates": run.updates,
        "loader": run.loader.state_dict(),
        "scaler": run.precision.scaler.state_dict(),
        "left_out": run.left_out,
        "epochs": [asdict(report) for report in run.history],
        "pruning": None if run.pruner is None else run.pruner.state_dict(),
    }


def restore(run: Worker, found: StoredCheckpoint) -> None:
    """Have a run go on from a checkpoint. Collective.

    On as many ranks it goes on exactly. On another number weights and the optimizer's state are
    the mean of all saved ranks', which of an exchange of gradients are one anyway.

    Raises UsageError where the run is another one; SourceError for a damaged checkpoint.
    """
    told = found.about
    _check(run, found)
    saved, ranks, rank = int(told["ranks"]), run.comm.size, run.comm.rank
    same = saved == ranks and told["exchange"] == run.config.exchange
    mine = found.read(f"rank{rank}/") if same else _merged(found, saved)
    tensors = {**found.read("all/"), **mine}
    pruning = told.get("pruning")
    if pruning is not None and run.pruner is not None:
        run.pruner.take_layout(pruning)
        run.reshaped()
    model = _part(tensors, "model/")
    with torch.no_grad():
        held = run.model.state_dict()
        _fits(found.path, held, model)
        for name, value in held.items():
            value.copy_(model[name])
    parameters = dict(run.model.named_parameters())
    for name, value in _part(tensors, "optimizer/").items():
        parameter_name, _, key = name.rpartition("/")
        parameter = parameters[parameter_name]
        if value.shape == parameter.shape and value.ndim:
            value = torch.empty_like(parameter).copy_(value)
        run.optimizer.state[parameter][key] = value
    if same:
        run.exchange.load_state(_part(tensors, "exchange/"))
        torch.set_rng_state(tensors["random"])
        if run.device.type == "cuda" and "random-cuda" in tensors:
            torch.cuda.set_rng_state(tensors["random-cuda"], run.device)
    else:
        torch.manual_seed((run.config.seed + int(told["updates"]) * 1_000_003 + rank) % 2**63)
        same_exchange = told["exchange"] == run.config.exchange
        run.exchange.load_state(_owed(found, saved, rank, ranks) if same_exchange else {})
    if pruning is not None and run.pruner is not None:
        run.pruner.load_state_dict(pruning, _part(tensors, "pruning/") if same else {})
    skipped = _part(tensors, "skip/")
    if run.skipper is not None and skipped:
        skipped["seen"] = _seen(found, saved, rank, ranks)
        run.skipper.load_state(skipped)
    left_out, scaler = told["left_out"], told["scaler"]
    if same:
        left_out, scale, growth = tensors["steps"].tolist()
        scaler = {**scaler, "scale": scale, "_growth_tracker": int(growth)} if scaler else scaler
    run.precision.scaler.load_state_dict(scaler)
    run.loader.load_state_dict(told["loader"])
    run.epoch_number, run.position = told["loader"]["epoch"], told["loader"]["position"]
    run.updates, run.left_out = told["updates"], int(left_out)
    run.sums.copy_(_own_sums(found, saved, rank, ranks))
    run.history = [EpochReport(**report) for report in told["epochs"]]


def _merged(found: StoredCheckpoint, saved: int) -> dict[str, torch.Tensor]:
    """The mean of what ranks had of their own, of model and optimizer."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(saved):
        for name, value in found.read(f"rank{rank}/").items():
            if not name.startswith(("model/", "optimizer/")):
                continue
            if not value.is_floating_point():
                total.setdefault(name, value)
            elif name in total:
                total[name] += value.double() / saved
            else:
                total[name] = value.double() / saved
    return {
        name: value.float() if value.dtype is torch.float64 else value
        for name, value in total.items()
    }


def _owed(found: StoredCheckpoint, saved: int, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """This rank's part of what compression has left out, whole numbers of ranks': none is lost."""
    total: dict[str, torch.Tensor] = {}
    for each in range(rank, saved, ranks):
        for name, value in found.read(f"rank{each}/exchange/").items():
            if _OWED in name:
                total[name] = total[name] + value if name in total else value
    return total


def _own_sums(found: StoredCheckpoint, saved: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's part of the sums of the epoch that is under way; whole numbers of ranks'."""
    total = torch.zeros(3, dtype=torch.float64)
    for each in range(rank, saved, ranks):
        total += found.read(f"rank{each}/sums")[""]
    return total


def _seen(found: StoredCheckpoint, saved: int, rank: int, ranks: int) -> torch.Tensor:
    """This rank's part of the losses of the epoch that is under way; whole numbers of ranks'."""
    total = torch.zeros(int(found.about["samples"]), dtype=torch.uint8)
    for each in range(rank, saved, ranks):
        total += found.read(f"rank{each}/skip/seen")[""]
    return total


def _check(run: Worker, found: StoredCheckpoint) -> None:
    config = run.config
    for name in _FIXED:
        if found.about[name] != getattr(config, name):
            raise UsageError(
                f"--resume: {found.path} was written with --{name.replace('_', '-')} "
                f"{found.about[name]}, this run has {getattr(config, name)}; go on with that, or "
                "name another --checkpoint folder"
            )
    pruned = found.about.get("pruning")
    if pruned is not None and pruned["layout"]["version"] and run.pruner is None:
        raise UsageError(
            f"--resume: {found.path} is of a pruned model: add --prune apoptosis; with "
            "--prune-tolerance 0 hardly any more goes"
        )
    if "kept" in found.about["loader"] and run.skipper is None:
        raise UsageError(
            f"--resume: {found.path} was written in an epoch that skips samples; go on with "
            "--skip-samples"
        )
    if found.about["samples"] != len(run.loader.data):
        raise UsageError(
            f"--resume: {found.path} is of a data set of {found.about['samples']} samples, "
            f"{config.source} has {len(run.loader.data)}"
        )


def _fits(path: str, held: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    for name, value in held.items():
        if name not in given:
            raise UsageError(f"--resume: {path} has no {name}: it is of another model")
        if given[name].shape != value.shape:
            raise UsageError(
                f"--resume: {path} has {name} of shape {tuple(given[name].shape)}, the model's is "
                f"{tuple(value.shape)}: it is of another model"
            )


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
