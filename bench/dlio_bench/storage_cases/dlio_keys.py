"""Workloads in the YAML of DLIO (Argonne's dlio_benchmark), read as they are.

Every key of a file falls into one of these classes, and none is ignored in silence:

- it sets a field of `Workload`, or is read by the checkpoint benchmark;
- DLIO knows it, and it has another meaning here or none: a note says so;
- it is unknown: an error, with the nearest key that is known.

`++workload.reader.batch_size=4`, as DLIO's command line takes it, overrides a key, and so does
`reader.batch_size=4`.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Final, TypeGuard

from dlio.errors import UsageError
from dlio.util.arguments import nearest
from dlio.util.input_files import read_text, yaml_value
from dlio_bench.storage_cases.workload import FORMATS, Format, Workload

_SHAPES: Final = files("dlio_bench.storage_cases") / "workloads"
_MOST_BYTES: Final = 1 << 20
_FORMATS: Final[dict[str, tuple[Format, str]]] = {
    **{name: (name, "") for name in FORMATS},
    "jpeg": ("folder", "images are uncompressed PPM files, so that decoding takes no time"),
    "png": ("folder", "images are uncompressed PPM files, so that decoding takes no time"),
    "npy": ("npz", "files are .npz"),
    "hdf5_opt": ("hdf5", "files are plain HDF5"),
    "indexed_binary": ("native", "files are native shards of dlio"),
    "mmap_indexed_binary": ("native", "files are native shards of dlio"),
}
"""Formats by DLIO's names and dlio's: the format that is written, and how it differs."""

_WORKLOAD: Final = (
    *("dataset.format", "dataset.num_files_train", "dataset.num_samples_per_file"),
    *("dataset.record_length_bytes", "dataset.record_length_bytes_stdev"),
    *("dataset.record_length", "dataset.record_length_stdev", "dataset.num_subfolders_train"),
    *("dataset.size_distribution", "model.name"),
    *("reader.batch_size", "reader.read_threads", "reader.file_shuffle", "reader.sample_shuffle"),
    *("train.computation_time", "train.computation_time_stdev", "train.epochs", "train.seed"),
    "metric.au",
)
_CHECKPOINT: Final = (
    *("model.type", "model.model_size", "model.model_size_bytes", "model.optimization_groups"),
    *("model.num_layers", "model.layer_parameters", "model.model_datatype"),
    *("model.optimizer_datatype", "model.parallelism.tensor", "model.parallelism.pipeline"),
    *("model.parallelism.data", "model.parallelism.zero_stage", "model.transformer.vocab_size"),
    *("model.transformer.hidden_size", "model.transformer.ffn_hidden_size"),
    *("model.transformer.num_attention_heads", "model.transformer.num_kv_heads"),
    *("checkpoint.fsync", "checkpoint.num_checkpoints_write", "checkpoint.num_checkpoints_read"),
    *("checkpoint.time_between_checkpoints", "checkpoint.mode", "checkpoint.model_size"),
)
_EFFECTS: Final[dict[str, tuple[str, ...]]] = {
    "options of the command set this": (
        *("framework", "reader.data_loader", "reader.data_loader_classname"),
        *("reader.data_loader_sampler", "reader.reader_classname", "dataset.data_folder"),
        *("dataset.keep_files", "output.folder", "output.log_file", "storage.storage_type"),
        *("storage.storage_root", "storage.storage_options"),
    ),
    "data is generated if it is missing": ("workflow.generate_data",),
    "always done": ("workflow.train",),
    "`dlio bench checkpoint` measures checkpoints": ("workflow.checkpoint",),
    "not measured": (
        *("workflow.evaluation", "workflow.profiling", "workflow.debug", "profiling.profiler"),
        *("profiling.iostat_devices", "evaluation.eval_time", "evaluation.eval_time_stdev"),
        *("evaluation.eval_after_epoch", "evaluation.epochs_between_evals"),
        *("dataset.num_files_eval", "dataset.num_subfolders_eval", "reader.batch_size_eval"),
        *("reader.preprocess_time", "reader.preprocess_time_stdev"),
    ),
    "samples reach the accelerator as they are stored": (
        *("dataset.record_length_bytes_resize", "reader.transformed_record_dims"),
        "reader.transformed_record_element_type",
    ),
    "data that cannot be compressed is stored without": (
        *("dataset.compression", "dataset.compression_level"),
    ),
    "formats have chunks of their usual size": (
        *("dataset.enable_chunking", "dataset.chunk_size", "dataset.hdf5"),
    ),
    "a sample is one binary column, of all the columns' bytes": ("dataset.parquet",),
    "files are named img_*": ("dataset.file_prefix",),
    "samples are generated one by one": ("dataset.generation_buffer_size",),
    "samples are strings of bytes": (
        *("dataset.record_dims", "dataset.record_element_bytes", "dataset.record_element_type"),
    ),
    "files are known by their names": (
        *("dataset.skip_listing", "dataset.listing_validation_interval"),
    ),
    "all files are read": ("dataset.num_files_generated",),
    "loaders do this as they are made": (
        *("reader.computation_threads", "reader.prefetch_size", "reader.shuffle_size"),
        *("reader.file_access", "reader.read_type", "reader.transfer_size", "reader.odirect"),
        *("reader.dont_use_mmap", "reader.multiprocessing_context"),
    ),
    "samples end in the host's memory": ("reader.pin_memory",),
    "all steps of the epochs are run": ("train.total_training_steps",),
    "every epoch has an order of its own": ("train.seed_change_epoch",),
    "one step at the start is left out": (
        *("output.metric.exclude_start_steps", "output.metric.exclude_end_steps"),
    ),
    "`dlio bench checkpoint` has its own": (
        *("checkpoint.checkpoint_folder", "checkpoint.checkpoint_after_epoch"),
        *("checkpoint.epochs_between_checkpoints", "checkpoint.steps_between_checkpoints"),
        *("checkpoint.type", "checkpoint.checkpoint_mechanism_classname"),
        *("checkpoint.recovery_rank_shift", "checkpoint.rank_sync"),
        *("checkpoint.randomize_tensor", "checkpoint.ksm"),
    ),
}
"""Keys that DLIO knows and `Workload` does not hold, by the reason for a note."""
_OTHERWISE: Final = {key: reason for reason, keys in _EFFECTS.items() for key in keys}
_OPEN: Final = ("storage.storage_options", "dataset.hdf5", "dataset.parquet", "checkpoint.ksm")
"""Keys with any keys below them."""
_KEYS: Final = (*_WORKLOAD, *_CHECKPOINT, *_OTHERWISE)


@dataclass(frozen=True, slots=True)
class WorkloadJob:
    """A workload as a file and overrides describe it."""

    workload: Workload
    settings: Mapping[str, object]
    """All keys with their values, such as `reader.batch_size`, overrides applied."""
    overridden: tuple[str, ...]
    """Keys that were overridden."""
    notes: tuple[str, ...]
    """Keys that have no effect here or another one, for people."""


def shape_names() -> list[str]:
    """Return the names of the workloads that dlio brings, such as `unet3d_h100`."""
    names = (entry.name for entry in _SHAPES.iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def read_job(source: str, overrides: Sequence[str] = ()) -> WorkloadJob:
    """Read a workload: a YAML file with DLIO's keys, or one of `shape_names`.

    Overrides are such as `reader.batch_size=4`, or `++workload.reader.batch_size=4`.

    Raises UsageError for unknown keys, and values that make no sense.
    """
    name = os.path.splitext(os.path.basename(source))[0]
    return job_of(dict(_flat(_loaded(source), source)), overrides, name, source)


def job_of(
    keys: Mapping[str, object], overrides: Sequence[str], name: str, origin: str
) -> WorkloadJob:
    """Return the job that DLIO's keys, such as `reader.batch_size`, and overrides describe; errors
    say the origin of the keys.

    Raises UsageError for unknown keys, and values that make no sense.
    """
    given = dict(map(_override, overrides))
    settings = dict(sorted({**keys, **given}.items()))
    for key in settings:
        _check_key(key, origin)
    workload, notes = _workload(settings, name, origin)
    return WorkloadJob(workload, settings, tuple(given), (*notes, *_notes(settings)))


def check_reads(settings: Mapping[str, object], source: str) -> None:
    """Raise UsageError for the keys of a workload of checkpoints alone, which reads no data."""
    of_data = [key for key in settings if key.startswith(("dataset.", "reader."))]
    of_checkpoints = [
        key
        for key in settings
        if key.startswith(("checkpoint.", "model.transformer.", "model.parallelism."))
    ]
    trains = settings.get("workflow.train", True) is not False
    if of_data or (trains and not of_checkpoints):
        return
    if not of_checkpoints:
        raise UsageError(
            f"{source} reads nothing (workflow.train: False, and no dataset:): give a dataset:"
        )
    raise UsageError(
        f"{source} describes no data to read (no dataset: and no reader:), but checkpoints: "
        f"measure them by `dlio bench checkpoint PATH --workload {source}`"
    )


def checkpoint_note(settings: Mapping[str, object]) -> list[str]:
    """Return a line that names the keys that matter to checkpoints alone, if there are some."""
    keys = [key for key in settings if key in _CHECKPOINT and key != "model.type"]
    if not keys:
        return []
    return [f"{', '.join(keys)}: no effect (`dlio bench checkpoint --workload` measures them)"]


def effects() -> dict[str, list[str]]:
    """Return all keys by their effect, in words."""
    return {
        "describe the data, its reading and the accelerator": list(_WORKLOAD),
        "describe checkpoints, for `dlio bench checkpoint`": list(_CHECKPOINT),
        **{f"none: {reason}": list(keys) for reason, keys in _EFFECTS.items()},
    }


def with_format(workload: Workload, format_: Format) -> Workload:
    """Return a workload with the same samples in another format."""
    if format_ == "folder":
        return replace(workload, format=format_, files=workload.samples, samples_per_file=1)
    return replace(workload, format=format_)


def _loaded(source: str) -> dict[str, object]:
    names = shape_names()
    if source in names:
        text = read_text(str(_SHAPES / f"{source}.yaml"))
    else:
        if not os.path.isfile(source):
            raise UsageError(
                f"{source} is neither a file nor a workload that dlio brings: name a YAML file, or "
                f"one of {', '.join(names)}{nearest(source, names)}"
            )
        try:
            text = read_text(source, _MOST_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{source} cannot be read: {error}; name a YAML file") from error
    try:
        values = yaml_value(text)
    except ValueError as error:
        raise UsageError(f"{source} is not YAML: {error}; correct it") from error
    if isinstance(values, dict) and isinstance(values.get("workload"), dict):
        values = values["workload"]  # A configuration that hydra has put together.
    if not isinstance(values, dict):
        raise UsageError(f"{source} holds no keys of DLIO, such as dataset: and reader:")
    return values


def _flat(
    values: Mapping[str, object], source: str, prefix: str = ""
) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        name = name.replace("data_reader", "reader", 1) if not prefix else name
        if name == "model" and isinstance(value, str):
            yield "model.name", value  # As the first versions have it.
        # Under some keys a mapping is the value.
        elif isinstance(value, Mapping) and not (name in _OPEN or name.endswith("_time")):
            yield from _flat(value, source, f"{name}.")
        else:
            yield name, value


def _override(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    key = key.strip().lstrip("+").removeprefix("workload.")
    key = key.replace("data_reader.", "reader.", 1)
    if not equals or not key:
        raise UsageError(f"{text}: write a key of DLIO and a value, such as reader.batch_size=4")
    try:
        return key, yaml_value(value)
    except ValueError as error:
        raise UsageError(f"{text}: the value is not YAML: {error}") from error


def _check_key(key: str, source: str) -> None:
    if key in _KEYS or any(key.startswith(f"{each}.") for each in _OPEN):
        return
    close = nearest(key, _KEYS)
    raise UsageError(
        f"{source}: {key} is not a key of DLIO{close or ': see docs/reference/workloads.md'}"
    )


def _workload(settings: Mapping[str, object], name: str, source: str) -> tuple[Workload, list[str]]:
    notes: list[str] = []

    def number(key: str, default: float, least: float = 0.0) -> float:
        value = settings.get(key, default)
        if not _is_number(value, least):
            raise UsageError(f"{source}: {key}: {value}: give a number from {least:g}")
        return float(value)

    def whole(key: str, default: int, least: int = 1) -> int:
        value = number(key, default, least)
        if value != int(value):
            raise UsageError(f"{source}: {key}: {value:g}: give a whole number")
        return int(value)

    format_, remark = _format(settings.get("dataset.format", "tfrecord"), source)
    if remark:
        notes.append(f"dataset.format: {remark}")
    if format_ != "folder" and settings.get("dataset.num_subfolders_train"):
        notes.append("dataset.num_subfolders_train: no effect (only class folders have some)")
    step_s, step_s_stdev, remark = _step(settings, source)
    if remark:
        notes.append(f"train.computation_time: {remark}")
    distribution = settings.get("dataset.size_distribution", "normal")
    if distribution not in ("normal", "lognormal"):
        raise UsageError(
            f"{source}: dataset.size_distribution: {distribution}: give normal or lognormal"
        )
    bytes_ = "dataset.record_length_bytes"
    size = bytes_ if bytes_ in settings else "dataset.record_length"
    deviation = f"{size if f'{size}_stdev' in settings else bytes_}_stdev"
    workload = Workload(
        name=name,
        format=format_,
        files=whole("dataset.num_files_train", 8),
        samples_per_file=whole("dataset.num_samples_per_file", 1),
        sample_bytes=number(size, 64 << 10, 1),
        sample_bytes_stdev=number(deviation, 0.0),
        batch_size=whole("reader.batch_size", 1),
        step_s=step_s,
        step_s_stdev=step_s_stdev,
        epochs=whole("train.epochs", 1),
        workers=whole("reader.read_threads", 1, 0),
        shuffle=any(
            settings.get(f"reader.{each}_shuffle", "off") not in ("off", False)
            for each in ("file", "sample")
        ),
        seed=whole("train.seed", 123, 0),
        subfolders=whole("dataset.num_subfolders_train", 0, 0),
        distribution="lognormal" if distribution == "lognormal" else "normal",
        least_au=number("metric.au", 0.9),
    )
    if not 0 < workload.least_au <= 1:
        raise UsageError(f"{source}: metric.au: {workload.least_au:g}: give a share from 0 to 1")
    return with_format(workload, format_), notes


def _is_number(value: object, least: float = 0.0) -> TypeGuard[float]:
    """True for a number, not less than the least one; NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= least


def _format(value: object, source: str) -> tuple[Format, str]:
    if not isinstance(value, str) or value not in _FORMATS:
        raise UsageError(
            f"{source}: dataset.format: {value}: choose one of {', '.join(_FORMATS)}"
            f"{nearest(str(value), _FORMATS)}"
        )
    return _FORMATS[value]


_MOMENTS: Final[dict[str, tuple[tuple[str, ...], Callable[..., tuple[float, float]]]]] = {
    "normal": (("mean", "stdev"), lambda mean, stdev: (mean, stdev)),
    "uniform": (("min", "max"), lambda low, high: ((low + high) / 2, abs(high - low) / 12**0.5)),
    "gamma": (("shape", "scale"), lambda shape, scale: (shape * scale, shape**0.5 * scale)),
    "exponential": (("scale",), lambda scale: (scale, scale)),
    "poisson": (("lam",), lambda mean: (mean, mean**0.5)),
}
"""DLIO's distributions of times: their parameters, and the mean and standard deviation of these."""


def _step(settings: Mapping[str, object], source: str) -> tuple[float, float, str]:
    """Return (mean, standard deviation in seconds, remark) of a step's computation."""
    key = "train.computation_time"
    value = settings.get(key, 0.0)
    remark = ""
    if isinstance(value, Mapping):
        kind = str(value.get("type", "normal"))
        if kind not in _MOMENTS:
            raise UsageError(f"{source}: {key}: type {kind}: choose one of {', '.join(_MOMENTS)}")
        wanted, moments = _MOMENTS[kind]
        given = {name: value.get(name, 0.0 if name == "stdev" else None) for name in wanted}
        for name, each in given.items():
            if not _is_number(each):
                raise UsageError(f"{source}: {key}: {name}: {each}: give seconds from 0")
        mean, stdev = moments(*(float(str(each)) for each in given.values()))
        if kind != "normal":
            remark = f"{kind} times are drawn as normal ones of the same mean and deviation"
    elif not _is_number(value):
        raise UsageError(f"{source}: {key}: {value}: give seconds from 0, or mean and stdev")
    else:
        mean, stdev = float(value), 0.0
    deviation = settings.get(f"{key}_stdev", stdev)
    if not _is_number(deviation):
        raise UsageError(f"{source}: {key}_stdev: {deviation}: give seconds from 0")
    return mean, float(deviation), remark


def _notes(settings: Mapping[str, object]) -> list[str]:
    """Return a line for each reason why keys have no effect here."""
    reasons: dict[str, list[str]] = {}
    for key in settings:
        top = next((each for each in _OPEN if key.startswith(f"{each}.")), key)
        if top in _OTHERWISE:
            reasons.setdefault(_OTHERWISE[top], []).append(top)
    return [
        f"{', '.join(dict.fromkeys(keys))}: no effect ({reason})"
        for reason, keys in reasons.items()
    ]
