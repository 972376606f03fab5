"""DlioLoader in the real DLIO benchmark, where `dlio bench peers install` has put it."""

import json
from pathlib import Path

import pytest

from dlio.launch.mpi_launch import launch
from dlio_bench.peers.environments import folder, missing, shared_environment

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(missing("dlio_benchmark") is not None, reason="dlio_benchmark is absent"),
]

CHECKED = """
import json, os
import numpy as np
from dlio.integrations import dlio_benchmark

class Checked(dlio_benchmark.DlioLoader):
    def next(self):
        for batch in super().next():
            for number, sample in zip(self.last_samples.tolist(), batch.numpy(), strict=True):
                with np.load(self._arguments.file_list_train[number]) as file:
                    assert (file["x"][..., 0] == sample).all(), number
            with open(os.environ["SEEN"], "a") as seen:
                line = [self._epoch, self._arguments.my_rank, self.last_samples.tolist()]
                seen.write(json.dumps(line) + chr(10))
            yield batch
"""


def run(data: Path, *keys: str, **variables: str) -> None:
    given = {
        "framework": "pytorch",
        "dataset.format": "npz",
        "dataset.num_files_train": 32,
        "dataset.num_files_eval": 8,
        "workflow.evaluation": False,
        "workflow.checkpoint": False,
        "dataset.record_length_bytes": 4096,
        "dataset.data_folder": data,
        "reader.data_loader": "pytorch",
        "reader.batch_size": 4,
        "reader.batch_size_eval": 2,
        "reader.read_threads": 2,
        "reader.sample_shuffle": "seed",
        "train.epochs": 2,
        "train.computation_time": 0.01,
    }
    words = [f"++workload.{key}={value}" for key, value in given.items()]
    program = f"{folder('dlio_benchmark')}/bin/dlio_benchmark"
    environment = shared_environment()
    environment["PYTHONPATH"] = f"{data.parent}:{environment['PYTHONPATH']}"
    done = launch(
        [program, "workload=default", *words, *keys, f"hydra.run.dir={data.parent / 'out'}"],
        2,
        environment={**environment, **variables},
        capture=True,
        timeout_s=300,
    )
    assert done.returncode == 0, done.stderr


def test_each_sample_is_trained_on_once_an_epoch_with_its_own_bytes(tmp_path: Path) -> None:
    data, seen = tmp_path / "data", tmp_path / "seen.jsonl"
    (tmp_path / "checked_loader.py").write_text(CHECKED)
    run(data, "++workload.workflow.generate_data=True", "++workload.workflow.train=False")
    run(
        data,
        "++workload.workflow.generate_data=False",
        "++workload.workflow.train=True",
        "++workload.reader.data_loader_classname=checked_loader.Checked",
        "++workload.reader.data_loader_sampler=index",
        "++workload.storage.storage_options.dlio_tiers=ram:16MiB",
        SEEN=str(seen),
    )
    lines = [json.loads(line) for line in seen.read_text().splitlines()]
    for epoch in (1, 2):
        for rank in (0, 1):
            assert sum(line[:2] == [epoch, rank] for line in lines) == 4
        samples = [k for line in lines if line[0] == epoch for k in line[2]]
        assert sorted(samples) == list(range(32))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len(summary["metric"]["train_au_percentage"]) == 2
