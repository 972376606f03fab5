"""Run many scripts in turn in one process, or on the ranks of one job.

    python worker.py WAY LIST [FAULT]       # with mpirun for several ranks

Each line of LIST is a folder with `train.py`. Output goes to `FOLDER.out/RANK.out` and `.err`; an
empty file `FOLDER.out/RANK.done` says that the script has ended. A script that fails ends the
process, or the job, unless it is alone. FAULT breaks dlio first (see `faults`).
"""

import atexit
import logging
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.fuzz.training.choices import runs_of


def main(way: str, folders: list[str]) -> None:
    """Run the scripts of some folders, as `alone`, `run`, `distribute` or `slices`."""
    import torch

    rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    for folder in folders:
        out = f"{folder}.out"
        os.environ["FUZZ_OUT"] = out
        os.chdir(folder)
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(f"{out}/{rank}.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, number)
            os.close(file)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        logging.root.handlers.clear()
        try:
            for _ in range(runs_of(Path("train.py").read_text(encoding="utf-8"))):
                _run(way)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            if way != "alone":
                raise
            continue
        sys.stdout.flush()
        sys.stderr.flush()
        Path(f"{out}/{rank}.done").touch()


def _run(way: str) -> None:
    if way != "run":
        runpy.run_path("train.py", run_name="__main__")
        return
    from dlio.integrations.script.private_files import PrivateFiles
    from dlio.integrations.script.run_options import RunOptions
    from dlio.integrations.script.runner import run_script

    kept: list[PrivateFiles] = []
    original = PrivateFiles.__init__

    def made(files: PrivateFiles, *args: Any) -> None:
        kept.append(files)
        original(files, *args)

    with patch.object(PrivateFiles, "__init__", made):
        run_script("train.py", (), RunOptions())
    # A rank's private files end with its process; here another script follows.
    for files in kept:
        atexit.unregister(files._close)
        files._close()


if __name__ == "__main__":
    if sys.argv[3:]:
        from tests.fuzz.training.faults import FAULTS

        FAULTS[sys.argv[3]]()
    listed = Path(sys.argv[2]).read_text(encoding="utf-8").split()
    if sys.argv[1] == "alone":
        main("alone", listed)
    else:
        from dlio.cli.command_line import guarded

        guarded(lambda: main(sys.argv[1], listed))
