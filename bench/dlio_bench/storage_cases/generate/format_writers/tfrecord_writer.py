"""The writer of TFRecord files of tf.train.Example, with features `image`, `size` and `label`.

DLIO's generator writes `image` and `size`. Messages are encoded here: their format is two dozen
bytes, and the library that knows it is TensorFlow.
"""

import struct
from typing import Final

import google_crc32c

from dlio_bench.storage_cases.generate.format_writers.part import FilePart

_LENGTH: Final = struct.Struct("<Q")
_CRC: Final = struct.Struct("<I")
_BYTES_LIST, _INT64_LIST = 1, 3


def write_tfrecord(path: str, part: FilePart) -> None:
    """Write a file of one record for each sample."""
    with open(path, "xb") as file:
        for data in part.payloads():
            features = {
                "image": _field(_BYTES_LIST, _field(1, data.tobytes())),
                "label": _field(_INT64_LIST, _field(1, _varint(part.label))),
                "size": _field(_INT64_LIST, _field(1, _varint(len(data)))),
            }
            entries = (
                _field(1, _field(1, name.encode()) + _field(2, feature))
                for name, feature in features.items()
            )
            record = _field(1, b"".join(entries))
            length = _LENGTH.pack(len(record))
            file.write(length + _masked(length))
            file.write(record)
            file.write(_masked(record))


def _field(number: int, body: bytes) -> bytes:
    """Encode a field of protobuf's type LEN."""
    return b"".join((_varint(number << 3 | 2), _varint(len(body)), body))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _masked(data: bytes) -> bytes:
    """Return the checksum of data as TFRecord stores it: rotated, so that it may be summed too."""
    crc = google_crc32c.value(data)
    return _CRC.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
