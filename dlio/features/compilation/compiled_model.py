"""Models that torch compiles (`--compile`)."""

import importlib.util
import os
import shutil
import stat
import sys
from collections.abc import Callable
from contextlib import suppress

import torch

from dlio.data.index import open_cache
from dlio.errors import UsageError
from dlio.train.feature_hooks import FeatureHooks, FeatureRun
from dlio.train.tasks.task_base import Outputs
from dlio.util.trusted_files import closing_descriptor, path_of
from dlio.util.user_folders import make_folders, parent_of


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
        use_private_cache()
        # `model.compile()` would not compile a Sequential of torch's own layers.
        compiled: Callable[[torch.Tensor], Outputs] = torch.compile(run.model)
        return compiled


def use_private_cache() -> None:
    """Have torch keep compiled code in this user's cache if others have, or can exchange, the
    folder that it takes in TMPDIR: it runs the code there. A folder that the user names stays."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    usual, variable = default_cache_dir(), "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(variable, usual) == usual and not _is_own(usual):
        with open_cache() as cache:
            os.environ[variable] = os.path.join(os.readlink(path_of(cache)), "torchinductor")


def _is_own(path: str) -> bool:
    """True if a folder is, or was made, this user's, and nobody else can write there or rename
    it."""
    with (
        suppress(OSError),
        closing_descriptor(make_folders(path, 0o700)) as folder,
        parent_of(path) as (above, _),
    ):
        own, parent = os.fstat(folder), os.fstat(above)
        held = parent.st_mode & stat.S_ISVTX or not parent.st_mode & 0o022
        return bool(held and own.st_uid == os.geteuid() and not own.st_mode & 0o022)
    return False
