"""The shape of a workload: its data, its reading and the accelerator that is emulated. Pure."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

Format = Literal["folder", "npz", "hdf5", "zarr", "parquet", "tar", "tfrecord", "native"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
Distribution = Literal["normal", "lognormal"]


@dataclass(frozen=True, slots=True)
class Workload:
    """A training job as its storage sees it; names in brackets are DLIO's keys."""

    name: str
    format: Format
    """Format of the data set [dataset.format]."""
    files: int
    """Number of files to train on [dataset.num_files_train]."""
    samples_per_file: int
    """[dataset.num_samples_per_file]"""
    sample_bytes: float
    """Mean size of a sample in bytes [dataset.record_length_bytes]."""
    sample_bytes_stdev: float
    """Standard deviation of a sample's size in bytes [dataset.record_length_bytes_stdev]."""
    batch_size: int
    """Samples per rank and step [reader.batch_size]."""
    step_s: float
    """Seconds that the emulated accelerator computes per step [train.computation_time]."""
    step_s_stdev: float = 0.0
    """[train.computation_time.stdev]"""
    epochs: int = 1
    """[train.epochs]"""
    workers: int = 1
    """Reading processes, or threads, per rank [reader.read_threads]."""
    shuffle: bool = True
    """True to read in random order [reader.file_shuffle, reader.sample_shuffle]."""
    seed: int = 0
    """[train.seed]"""
    subfolders: int = 0
    """Class folders of the format `folder` [dataset.num_subfolders_train]; 0 for a usual number."""
    distribution: Distribution = "normal"
    """Distribution of the samples' sizes. DLIO knows normal only."""
    least_au: float = 0.9
    """Share of time that the accelerator must be busy to pass [metric.au]."""

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return self.files * self.samples_per_file
