"""Runs a script whose ranks end in the middle of a step: `ending.py SCRIPT ARGUMENTS`.

`ENDS='{"1": [5, "before"]}'` kills rank 1 before, or after, its fifth backward pass.
"""

import json
import os
import runpy
import signal
import sys
from typing import Any

import torch

number, when = json.loads(os.environ["ENDS"]).get(os.environ["OMPI_COMM_WORLD_RANK"], [0, ""])
original: Any = torch.Tensor.backward
passes = 0


def backward(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
    """Run backward as ever, unless it is this rank's end."""
    global passes
    passes += 1
    if passes == number and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    original(tensor, *args, **options)
    if passes == number:
        os.kill(os.getpid(), signal.SIGKILL)


torch.Tensor.backward = backward  # type: ignore[assignment,method-assign]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
