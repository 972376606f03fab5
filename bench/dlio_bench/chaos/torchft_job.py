"""A job of torchft for the bench: its data, its model and its command."""

import json
import os
import subprocess
import warnings
from typing import Final

import numpy as np
import torch
from torch.jit.frontend import FrontendError

from dlio.errors import UsageError
from dlio_bench.chaos.chaos_job import IMAGE_SIZE
from dlio_bench.chaos.chaos_options import ChaosOptions
from dlio_bench.chaos.torchft_program import TorchftSettings

_PROGRAM: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torchft_program.py")
_VERSIONS: Final = (
    "import importlib.metadata as m, torchft; print(*(m.version(n) for n in ('torchft', 'torch')))"
)
_LOOK_S: Final = 120.0


def torchft_versions(python: str) -> dict[str, str]:
    """Return the versions of torchft and torch.

    Args:
        python: an interpreter.

    Raises UsageError if it cannot import them.
    """
    try:
        done = subprocess.run(
            [python, "-I", "-c", _VERSIONS],
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"--torchft {python}: cannot be run: {error}") from error
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise UsageError(
            f"--torchft {python}: cannot import torchft ({reason[0]}): name the interpreter of an "
            "environment made by `pip install torchft torch`"
        )
    torchft, torch_ = done.stdout.split()
    return {"torchft": torchft, "torch": torch_}


def torchft_argv(
    options: ChaosOptions, source: str, folder: str, model: str, plain: bool = False
) -> list[str]:
    """Return the command of a job of torchft that stamps its steps into `folder`, which is made.

    Pictures are decoded once, as their middle, next to the job's folder; the model has the same
    shape as dlio's, and the same initial weights in all replica groups.

    Args:
        plain: train by torch's DistributedDataParallel, without torchft.

    Raises UsageError for a model that cannot be scripted.
    """
    if options.torchft is None:
        raise UsageError("--torchft: name a Python interpreter")
    data = os.path.join(os.path.dirname(folder), "torchft-data")
    classes = _decode(source, data)
    os.makedirs(folder)
    settings: TorchftSettings = {
        "data": data,
        "model": os.path.join(folder, "model.pt"),
        "ranks": options.ranks,
        "batch_size": options.batch_size,
        "epochs": options.epochs,
        "pause_s": options.pause_ms / 1000,
        "heartbeat_ms": options.torchft_heartbeat_ms,
        "seed": options.seed,
        "bench": os.getpid(),
        "plain": plain,
    }
    _script(model, classes, options.seed, settings["model"])
    with open(os.path.join(folder, "settings.json"), "w", encoding="utf-8") as file:
        json.dump(settings, file)
    # -I: the folder of the program has modules of names that others may use.
    return [options.torchft, "-I", _PROGRAM, "supervise", folder]


def _decode(source: str, folder: str) -> int:
    """Write decoded pictures and labels, unless they are there; return the number of classes."""
    import dlio

    with dlio.open(source, tiers="none", image_size=IMAGE_SIZE, train=False) as dataset:
        classes = len(dataset.classes)
        if not os.path.isdir(folder):
            os.makedirs(folder)
            pictures = np.empty((len(dataset), 3, IMAGE_SIZE, IMAGE_SIZE), np.uint8)
            for sample in range(len(dataset)):
                pictures[sample] = dataset[sample][0]
            np.save(os.path.join(folder, "pictures.npy"), pictures)
            np.save(os.path.join(folder, "labels.npy"), np.asarray(dataset.targets, np.int64))
    return classes


def _script(text: str, classes: int, seed: int, path: str) -> None:
    """Write a model in a form that needs only torch. Raises UsageError if there is none."""
    from dlio.train.model import make_model

    torch.manual_seed(seed)
    model = make_model(text, classes, IMAGE_SIZE)
    with warnings.catch_warnings():
        # torch.export has no training mode whose batches may end with a smaller one.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        try:
            torch.jit.save(torch.jit.script(model), path)
        except (FrontendError, OSError, RuntimeError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UsageError(
                f"--model {text}: torch.jit.script cannot script it for --torchft: {reason}"
            ) from error
