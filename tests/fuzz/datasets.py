"""Parsers that want a whole data set around the fuzzed bytes: a sound one with one file replaced.

Formats with a checksum are also fuzzed with the checksum made right, since no fuzzer finds one.
"""

import atexit
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Final, cast

import xxhash

from tests.hostile import child
from tests.hostile.corpus import (
    annotated,
    checkpoints,
    compressed,
    hdf5,
    idxfiles,
    mds,
    parquets,
    scans,
    shards,
    tables,
    tars,
    tiers,
    tokenfiles,
    xmlfiles,
    zarrs,
)
from tests.hostile.corpus.case import Ask, Make

__all__ = ["DATASETS", "seed"]

Seal = Callable[[bytes], bytes]
_TRAILER: Final = struct.Struct("<QQQ8s")


def _sealed_footer(data: bytes) -> bytes:
    """Make the checksum of a shard's footer right."""
    if len(data) < _TRAILER.size:
        return data
    start, length, _, magic = _TRAILER.unpack(data[-_TRAILER.size :])
    digest = xxhash.xxh3_64_intdigest(data[start : start + length])
    return data[: -_TRAILER.size] + _TRAILER.pack(start, length, digest, magic)


def _as_it_is(data: bytes) -> bytes:
    return data


_folders: list[Path] = []


@atexit.register
def remove() -> None:
    """Remove the data sets. Tests call it: their processes may end without it."""
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)
    _dataset.cache_clear()


class Dataset:
    """A sound data set, of which one file is replaced by each input.

    Args:
        make: writes the data set into an empty folder.
        victim: pattern of the file; the first match counts.
        seal: corrects checksums of the input.
    """

    def __init__(self, make: Make, victim: str, seal: Seal = _as_it_is) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="dlio-fuzz-"))
        _folders.append(self._folder)
        self._ask: Ask = make(self._folder)
        self._victim = min(self._folder.glob(victim))
        self._seal = seal
        self.seed = self._victim.read_bytes()

    def __call__(self, data: bytes) -> None:
        """Read the data set with these bytes in place of the file's."""
        self._victim.write_bytes(self._seal(data))
        # A cache that cannot be written is not used, so that nothing is left of an input.
        os.environ["DLIO_CACHE"] = "/proc/none"
        child.KINDS[self._ask.kind](cast("str", self._ask.path), dict(self._ask.options))


_MADE: Final[dict[str, tuple[Make, str, Seal]]] = {
    "tar": (tars.sound, "a.tar", _as_it_is),
    "tar_packed": (tars.packed, "a.tar", _as_it_is),
    "tar_lz4": (tars.compressed, "a.tar.lz4", _as_it_is),
    "mds_index": (mds.sound, "data/index.json", _as_it_is),
    "mds_shard": (mds.sound, "data/shard.0.mds", _as_it_is),
    "csv": (tables.table, "a.csv", _as_it_is),
    "npz": (tables.npz, "a.npz", _as_it_is),
    "shard": (shards.sound, "data/0.dlio", _sealed_footer),
    "zarr3": (zarrs.sound, "a.zarr/x/zarr.json", _as_it_is),
    "zarr2": (zarrs.sound2, "a.zarr/x/.zarray", _as_it_is),
    "zarr_chunk": (zarrs.sound, "a.zarr/x/c/0/0", _as_it_is),
    "hdf5": (hdf5.sound, "a.h5", _as_it_is),
    "parquet": (parquets.sound, "a.parquet", _as_it_is),
    "cache_head": (tiers.cached, "cache/*/kept/head.json", _as_it_is),
    "coco": (annotated.coco_masks, annotated.COCO_FILE, _as_it_is),
    "yolo_label": (annotated.yolo, "data/labels/1.txt", _as_it_is),
    "yolo_yaml": (annotated.yolo, "data/data.yaml", _as_it_is),
    "voc_note": (xmlfiles.sound, xmlfiles.NOTE, _as_it_is),
    "voc_list": (xmlfiles.sound, xmlfiles.LIST, _as_it_is),
    "idx": (idxfiles.sound, idxfiles.PICTURES, _as_it_is),
    "idx_gz": (idxfiles.packed, f"{idxfiles.PICTURES}.gz", _as_it_is),
    "tokens_head": (tokenfiles.headed, tokenfiles.TOKENS, _as_it_is),
    "tokens_index": (tokenfiles.megatron, tokenfiles.INDEX, _as_it_is),
    "mask": (annotated.masks, "data/masks/1.png", _as_it_is),
    "picture_list": (annotated.lists, "data/train.csv", _as_it_is),
    "picture_text": (annotated.listed, "data/train.txt", _as_it_is),
    "dicom": (scans.sound, "x.dcm", _as_it_is),
    "dicom_deflated": (scans.deflated, "x.dcm", _as_it_is),
    "nifti_gz": (scans.packed, "x.nii.gz", _as_it_is),
    "ome_zarr": (scans.ome, "x.ome.zarr/.zattrs", _as_it_is),
    "table_gz": (compressed.packed_table, "a.csv.gz", _as_it_is),
    "tar_gz": (compressed.packed_tar, "a.tar.gz", _as_it_is),
    "checkpoint_about": (checkpoints.sound, "c/step-00000002/about.json", _as_it_is),
}


@cache
def _dataset(name: str) -> Dataset:
    return Dataset(*_MADE[name])


def _read(name: str, data: bytes) -> None:
    _dataset(name)(data)


DATASETS: Final[dict[str, Callable[[bytes], None]]] = {name: partial(_read, name) for name in _MADE}
"""Parsers by name; each makes its data set when it is first called."""


def seed(name: str) -> bytes:
    """Return the sound contents of the file that a parser replaces."""
    return _dataset(name).seed
