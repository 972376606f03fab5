"""A stand-in for the parts of Argonne's DLIO benchmark that DlioLoader uses, and its files."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

SIDE = 12
"""Rows and columns of a sample."""


class Logger:
    """Keeps DLIO's messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def output(self, line: str) -> None:
        self.lines.append(line)


def arguments(files: list[str], form: str, **changes: object) -> SimpleNamespace:
    """Return DLIO's settings for files of a format."""
    values: dict[str, object] = {
        "format": form,
        "storage_type": "local_fs",
        "storage_options": {"dlio_tiers": "none"},
        "odirect": False,
        "file_list_train": files,
        "file_list_eval": [],
        "num_samples_per_file": 1,
        "batch_size": 3,
        "batch_size_eval": 2,
        "comm_size": 1,
        "my_rank": 0,
        "total_training_steps": -1,
        "file_shuffle": "off",
        "sample_shuffle": "seed",
        "epochs": 2,
        "do_eval": False,
        "eval_after_epoch": 1,
        "epochs_between_evals": 1,
        "seed": 123,
        "seed_change_epoch": True,
        "read_threads": 2,
        "prefetch_size": 4,
        "pin_memory": True,
        "preprocess_time": {},
        "resized_image": np.zeros((SIDE, SIDE), np.uint8),
        "logger": Logger(),
    }
    return SimpleNamespace(**{**values, **changes})


@contextmanager
def installed(settings: SimpleNamespace) -> Iterator[None]:
    """Have DLIO's modules give these settings."""
    config: Any = ModuleType("dlio_benchmark.utils.config")
    config.ConfigArguments = SimpleNamespace(get_instance=lambda: settings)
    utility: Any = ModuleType("dlio_benchmark.utils.utility")
    utility.slept = []
    utility.sleep = utility.slept.append
    modules = {
        "dlio_benchmark": ModuleType("dlio_benchmark"),
        "dlio_benchmark.utils": ModuleType("dlio_benchmark.utils"),
        "dlio_benchmark.utils.config": config,
        "dlio_benchmark.utils.utility": utility,
    }
    with mock.patch.dict(sys.modules, modules):
        yield


def pictures(files: int, per_file: int) -> npt.NDArray[np.uint8]:
    """Return the samples of files, all different; shape (files, SIDE, SIDE, per_file)."""
    return np.random.default_rng(7).integers(0, 255, (files, SIDE, SIDE, per_file), dtype=np.uint8)


def write(folder: Path, form: str, files: int, per_file: int) -> list[str]:
    """Write files as DLIO generates them. Returns their paths, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, records in enumerate(pictures(files, per_file)):
        path = folder / f"img_{number:02d}_of_{files}.{form}"
        _write(path, form, records)
        paths.append(str(path))
    return paths


def _write(path: Path, form: str, records: npt.NDArray[np.uint8]) -> None:
    count = records.shape[-1]
    if form == "npz":
        np.savez(path, x=records, y=[0] * count)
    elif form == "npy":
        np.save(path, records)
    elif form == "hdf5":
        import h5py

        with h5py.File(path, "w", libver="latest") as file:
            file.create_dataset("records_0", data=np.moveaxis(records, -1, 0))
            file.create_dataset("labels", data=[0] * count)
    elif form == "csv":
        lines = [",".join(f"{v:03d}" for v in records[..., k].ravel()) for k in range(count)]
        path.write_text("".join(f"{line}\n" for line in lines))
    elif form == "png":
        import cv2

        path.write_bytes(cv2.imencode(".png", records[..., 0])[1].tobytes())
    else:
        path.write_bytes(np.moveaxis(records, -1, 0).tobytes())
        sizes = np.full(count, SIDE * SIDE, "<u8")
        Path(f"{path}.sz.idx").write_bytes(sizes.tobytes())


def main(folder: str) -> None:
    """Run two epochs on the ranks of a job, and print each rank's samples as JSON."""
    from dlio.comm.world import world
    from dlio.integrations.dlio_benchmark import DlioLoader

    comm = world()
    paths = sorted(str(path) for path in Path(folder).glob("*.npz"))
    options = {"dlio_tiers": "ram:4MiB"}
    settings = arguments(paths, "npz", storage_options=options)
    settings.comm_size, settings.my_rank = comm.size, comm.rank
    seen = []
    with installed(settings):
        loader = DlioLoader("npz", "train", 1)
        loader.read()
        for _ in range(2):
            seen.append([batch.numpy().reshape(len(batch), -1).tolist() for batch in loader.next()])
            loader.finalize()
    for rank, part in enumerate(comm.allgather(seen)):
        if comm.rank == 0:
            print(json.dumps([rank, part]))


if __name__ == "__main__":
    main(sys.argv[1])
