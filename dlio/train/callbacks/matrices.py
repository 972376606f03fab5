"""Dump weights and gradients as numpy files for inspection."""

import io
import operator
import os

import numpy as np
import torch

from dlio.train.callbacks.callback_base import Callback, Run
from dlio.train.report import EpochReport
from dlio.util.user_folders import make_folders
from dlio.util.whole_files import unwritable, write_whole


class MatrixDump(Callback):
    """Write rank 0's matrices at the end of each epoch.

    FOLDER/epoch-0001/weights/NAME.npy holds each parameter and buffer, gradients/NAME.npy the
    gradients of the epoch's last step. Types narrower than 32 bits are written as float32.
    """

    def __init__(self) -> None:
        self._gradients: dict[str, torch.Tensor] = {}

    def begins(self, run: Run) -> None:
        _make(_folder_of(run))

    def after_step(self, run: Run) -> None:
        self._gradients = {
            name: parameter.grad
            for name, parameter in run.model.named_parameters()
            if parameter.grad is not None
        }

    def epoch_ends(self, run: Run, report: EpochReport) -> None:
        epoch = os.path.join(_folder_of(run), f"epoch-{report.epoch + 1:04d}")
        for kind, tensors in (("weights", run.model.state_dict()), ("gradients", self._gradients)):
            folder = os.path.join(epoch, kind)
            _make(folder)
            for name, tensor in tensors.items():
                held = tensor.detach().cpu()
                if held.is_floating_point() and held.itemsize < 4:
                    held = held.float()
                packed = io.BytesIO()
                np.save(packed, held.numpy())
                path = os.path.join(folder, f"{name}.npy")
                write_whole(path, operator.methodcaller("write", packed.getbuffer()))


def _folder_of(run: Run) -> str:
    folder = run.config.callbacks.dump_matrices
    assert folder is not None
    return folder


def _make(folder: str) -> None:
    try:
        os.close(make_folders(folder))
    except OSError as error:
        raise unwritable(f"--dump-matrices {folder}", error) from error
