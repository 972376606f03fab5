"""Checkpoints as a workload of DLIO or MLPerf Storage describes them. Pure, but for its file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dlio.errors import UsageError
from dlio_bench.storage_cases.dlio_keys import read_job

_WIDTHS: Final = {
    **dict.fromkeys(("int8", "uint8", "fp8"), 1),
    **dict.fromkeys(("fp16", "bf16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("fp32", "float32", "int32"), 4),
    **dict.fromkeys(("fp64", "float64", "int64"), 8),
}
"""Bytes of a number, by DLIO's names of its type."""
_MOMENTS: Final = 3
"""Numbers of the optimizer's state per parameter: weight, momentum and variance."""
_SHAPE: Final = (
    *("model.transformer.hidden_size", "model.transformer.ffn_hidden_size"),
    *("model.transformer.num_attention_heads", "model.num_layers"),
)
_OF_MODEL: Final = (
    *(*_SHAPE, "model.transformer.vocab_size", "model.transformer.num_kv_heads", "model.name"),
    *("model.model_datatype", "model.optimizer_datatype", "model.model_size", "model.type"),
    *("model.model_size_bytes", "checkpoint.model_size", "model.optimization_groups"),
    *("model.layer_parameters", "checkpoint.num_checkpoints_write"),
    *("checkpoint.num_checkpoints_read", "workflow.checkpoint"),
)
"""Keys that have an effect on the bytes or the number of checkpoints, or none that is missing."""


@dataclass(frozen=True, slots=True)
class CheckpointWorkload:
    """Checkpoints of a job."""

    name: str
    bytes: int
    """Of all ranks' checkpoint together."""
    writes: int | None
    """Checkpoints to write, each of which is read back; None if the workload does not say."""
    notes: tuple[str, ...]
    """Keys that have no effect, for people."""


def decoder_parameters(
    layers: int, hidden: int, feed_forward: int, heads: int, key_heads: int, vocabulary: int
) -> int:
    """Parameters of a decoder-only transformer with grouped queries and a gated feed-forward
    network; input and output embeddings are separate."""
    keys = hidden * key_heads // heads
    layer = 2 * hidden * (hidden + keys) + 3 * hidden * feed_forward + 2 * hidden
    return layers * layer + 2 * vocabulary * hidden + hidden


def read_checkpoints(source: str, overrides: Sequence[str] = ()) -> CheckpointWorkload:
    """Read a workload's checkpoints: a YAML file with DLIO's keys, or the name of a workload that
    dlio brings.

    Raises UsageError for unknown keys, values that make no sense, and workloads that describe no
    checkpoint.
    """
    job = read_job(source, overrides)
    keys = job.settings
    size = _bytes(keys, source)
    if not size:
        raise UsageError(
            f"{source} describes no checkpoint: give model.transformer and model.num_layers, "
            "model.model_size, model.layer_parameters or model.optimization_groups; or leave "
            "--workload out, and choose a --model"
        )
    without = [key for key in keys if key not in _OF_MODEL]
    notes = [f"{', '.join(without)}: no effect on checkpoints here"] if without else []
    writes = keys.get("checkpoint.num_checkpoints_write")
    reads = keys.get("checkpoint.num_checkpoints_read", writes)
    if reads != writes:
        notes.append(
            f"checkpoint.num_checkpoints_read: {reads}: each checkpoint that is written is read "
            "back once"
        )
    count = None if writes is None else _whole("checkpoint.num_checkpoints_write", keys, source)
    name = str(keys.get("model.name", job.workload.name))
    return CheckpointWorkload(name, size, count, tuple(notes))


def _bytes(keys: Mapping[str, object], source: str) -> int:
    """Return the bytes of a checkpoint's model and optimizer state, 0 if there is none."""
    of_model, of_optimizer = (
        _width(key, keys, usual, source)
        for key, usual in (("model.model_datatype", "fp16"), ("model.optimizer_datatype", "fp32"))
    )
    if any(key in keys for key in _SHAPE[:-1]):
        hidden, feed_forward, heads, layers = (_whole(key, keys, source) for key in _SHAPE)
        key_heads = _whole("model.transformer.num_kv_heads", keys, source, heads)
        vocabulary = _whole("model.transformer.vocab_size", keys, source)
        count = decoder_parameters(layers, hidden, feed_forward, heads, key_heads, vocabulary)
        return count * (of_model + _MOMENTS * of_optimizer)
    names = ("model.model_size_bytes", "model.model_size", "checkpoint.model_size")
    size = next((_whole(key, keys, source) for key in names if key in keys), 0)
    layer = sum(_list("model.layer_parameters", keys, source))
    layers = _whole("model.num_layers", keys, source, 1) if layer else 0
    groups = sum(_list("model.optimization_groups", keys, source))
    return size + layers * layer * of_model + groups * of_optimizer


def _width(key: str, keys: Mapping[str, object], usual: str, source: str) -> int:
    value = keys.get(key, usual)
    if value not in _WIDTHS:
        raise UsageError(f"{source}: {key}: {value}: choose one of {', '.join(_WIDTHS)}")
    return _WIDTHS[str(value)]


def _whole(key: str, keys: Mapping[str, object], source: str, usual: int | None = None) -> int:
    value = keys.get(key, usual)
    if type(value) is not int or value < 1:
        raise UsageError(f"{source}: {key}: {value}: give a whole number from 1")
    return value


def _list(key: str, keys: Mapping[str, object], source: str) -> list[int]:
    value = keys.get(key, [])
    if not isinstance(value, list) or not all(type(each) is int and each > 0 for each in value):
        raise UsageError(f"{source}: {key}: {value}: give a list of whole numbers from 1")
    return value
