"""TFRecord files for tests, written with the protobuf library and the frames of TensorBoard."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tensorboard.summary.writer.record_writer import RecordWriter

__all__ = ["example", "parse", "sequence_example", "write"]

Values = Mapping[str, Sequence[Any]]
_REPEATED, _OPTIONAL = 3, 1


def _messages() -> Any:
    """Return the pool with the messages of tf.train.Example."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = {"BytesList": 12, "FloatList": 2, "Int64List": 3}
    for name, kind in kinds.items():
        file.message_type.add(name=name).field.add(name="value", number=1, label=3, type=kind)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, each) in enumerate(
        (("bytes_list", "BytesList"), ("float_list", "FloatList"), ("int64_list", "Int64List")), 1
    ):
        feature.field.add(
            name=name,
            number=number,
            label=_OPTIONAL,
            type=11,
            type_name=f".t.{each}",
            oneof_index=0,
        )
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_OPTIONAL, type=9)
    entry.field.add(name="value", number=2, label=_OPTIONAL, type=11, type_name=".t.Feature")
    features.field.add(
        name="feature", number=1, label=_REPEATED, type=11, type_name=".t.Features.FeatureEntry"
    )
    whole = file.message_type.add(name="Example")
    whole.field.add(name="features", number=1, label=_OPTIONAL, type=11, type_name=".t.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


_EXAMPLE: Any = message_factory.GetMessageClass(_messages().FindMessageTypeByName("t.Example"))


def example(values: Values) -> bytes:
    """Return an Example: lists of bytes, floats or whole numbers by name."""
    made = _EXAMPLE()
    for name, each in values.items():
        feature = made.features.feature[name]
        if len(each) and isinstance(each[0], bytes):
            feature.bytes_list.value.extend(each)
        elif len(each) and isinstance(each[0], float):
            feature.float_list.value.extend(each)
        else:
            feature.int64_list.value.extend(each)
    encoded: bytes = made.SerializeToString(deterministic=True)
    return encoded


def parse(data: bytes) -> dict[str, list[Any]]:
    """Return the values of an Example by the names of its features."""
    made = _EXAMPLE.FromString(data)
    return {
        name: list(getattr(feature, feature.WhichOneof("kind")).value)
        for name, feature in made.features.feature.items()
    }


def sequence_example(values: Values) -> bytes:
    """Return a SequenceExample with a context and an empty list of features."""
    return example(values) + b"\x12\x00"


def write(path: Path, records: Iterable[bytes]) -> None:
    """Write a TFRecord file; large records without TensorBoard's writer: it takes 1 s for 10 MB."""
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for record in records:
            if len(record) < 10_000:
                writer.write(record)
            else:
                length = struct.pack("<Q", len(record))
                file.write(length + _masked(length) + record + _masked(record))


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
