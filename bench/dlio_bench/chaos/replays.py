"""A job's trace again, without faults: are the final weights the same?"""

import os
import time
from typing import Final

import torch

from dlio_bench.chaos.chaos_job import ChaosJob, train_argv
from dlio_bench.chaos.chaos_options import ChaosOptions

WEIGHTS: Final = "weights.pt"
"""File in a job's folder."""
_POLL_S: Final = 0.05


def replay(options: ChaosOptions, source: str, folder: str, cache: str) -> str:
    """Replay a job; see `JobRecord.replay`.

    Args:
        folder: of the job, with its trace and its weights.
        cache: value of DLIO_CACHE.
    """
    own = f"{folder}-replay"
    more = ["--replay", f"{folder}/trace.jsonl", "--save", f"{own}/{WEIGHTS}"]
    with ChaosJob(
        train_argv(options, source, own, options.model, more), own, cache, options.deadline
    ) as job:
        while job.runs():
            time.sleep(_POLL_S)
        if job.code != 0:
            return "it hung" if job.hung else job.errors or f"exit code {job.code}"
    one, other = (torch.load(os.path.join(each, WEIGHTS)) for each in (folder, own))
    same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return "equal" if same else "other"
