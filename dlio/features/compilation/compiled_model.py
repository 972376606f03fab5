"""Models that torch compiles (`--compile`)."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable

import torch

from dlio.errors import UsageError
from dlio.train.feature_hooks import FeatureHooks, FeatureRun
from dlio.train.tasks.task_base import Outputs


class CompileHooks(FeatureHooks):
    """Runs the model compiled, in training, from the first call on.

    The model itself stays as it is, with the names of its state.
    """

    def wrapped(
        self, run: FeatureRun, model: Callable[[torch.Tensor], Outputs]
    ) -> Callable[[torch.Tensor], Outputs]:
        """Raises UsageError if the compiler that torch needs for the device is not installed."""
        if run.device.type == "cuda" and importlib.util.find_spec("triton") is None:
            raise UsageError(
                "--compile: torch compiles for GPUs with triton, which is not installed: install "
                "it, or leave --compile out"
            )
        usual = "clang++" if sys.platform == "darwin" else "g++"
        compiler = os.environ.get("CXX") or usual
        if run.device.type == "cpu" and shutil.which(compiler) is None:
            raise UsageError(
                f"--compile: torch needs a C++ compiler, and {compiler} is not found: install "
                f"{usual}, name another one by CXX, or leave --compile out"
            )
        # `model.compile()` would not compile a Sequential of torch's own layers.
        compiled: Callable[[torch.Tensor], Outputs] = torch.compile(run.model)
        return compiled
