"""The parts of a checkpoint: each rank writes its own, and any rank can complete it.

    FOLDER/__0_0.distcp      tensors of rank 0
    FOLDER/part-0.json       where they lie in it; written when they are on disk
    FOLDER/.metadata         the table of contents, made from all parts

The files are those of torch.distributed.checkpoint. Its own collective operations are not used: a
rank that is lost would leave the others waiting.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from dlio.comm.comm_protocol import Request
from dlio.comm.deadlines import leave
from dlio.comm.survival.membership import RankMessages
from dlio.train.checkpoint.tensor_file import write_tensors
from dlio.util.folders import remove_path
from dlio.util.whole_files import write_json

_TEXT_BYTES: Final = 1024
"""Bytes of an outcome in a message; the rest of a longer text is cut off."""
_TAG: Final = 1


def write_part(folder: str, rank: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a rank's tensors into the folder of an unfinished checkpoint, which exists.

    Raises OSError, which names the file.
    """
    name = f"__{rank}_0.distcp"
    places = write_tensors(os.path.join(folder, name), tensors)
    entries = {
        key: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "file": name,
            "offset": places[key][0],
            "length": places[key][1],
        }
        for key, tensor in tensors.items()
    }
    write_json(_part(folder, rank), entries)


def has_part(folder: str, rank: int) -> bool:
    """True if a rank has written all of its tensors."""
    return any(map(os.path.exists, (_part(folder, rank), _contents(folder))))


def complete(folder: str, ranks: int) -> None:
    """Make the table of contents of all parts, in place of the files that describe each.

    May be called again by another rank if this one is lost meanwhile.
    """
    if not os.path.exists(_contents(folder)):
        _write_contents(folder, ranks)
    for rank in range(ranks):
        remove_path(_part(folder, rank))


def _write_contents(folder: str, ranks: int) -> None:
    described: dict[str, TensorStorageMetadata] = {}
    results: list[WriteResult] = []
    for rank in range(ranks):
        with open(_part(folder, rank), encoding="utf-8") as file:
            entries: dict[str, Any] = json.load(file)
        for name, entry in entries.items():
            size = torch.Size(entry["shape"])
            offsets = torch.Size([0] * len(size))
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, entry["dtype"])),
                size,
                [ChunkStorageMetadata(offsets, size)],
            )
            place = _StorageInfo(entry["file"], entry["offset"], entry["length"])
            index = MetadataIndex(name, offsets, 0)
            results.append(WriteResult(index, entry["length"], place))
    metadata = Metadata(
        dict(described),
        planner_data={name: (name,) for name in described},
    )
    writer = FileSystemWriter(folder, sync_files=True)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [results])


def agree(
    messages: RankMessages,
    rank: int,
    ranks: int,
    error: str,
    publish: Callable[[], str],
    wait: Callable[[Sequence[Request]], None],
) -> str:
    """Publish a checkpoint when all ranks have written their parts; return the error, or nothing.

    The same on all ranks, which call it together, each in a thread. Raises PeerLost.

    Args:
        error: of this rank; empty if its part is written.
        publish: called on rank 0 if all went well; returns an error, or nothing.
        wait: returns when all requests are done.
    """

    def exchange(send: bool, others: Sequence[int], texts: Sequence[str]) -> list[str]:
        buffers = [bytearray(_encoded(text)) for text in texts]
        start = messages.isend if send else messages.irecv
        requests: list[Request] = []
        try:
            for other, buffer in zip(others, buffers, strict=True):
                requests.append(start(buffer, other, _TAG))
            wait(requests)
        except BaseException:
            leave(requests, buffers)  # MPI may still use them.
            raise
        return [bytes(buffer).rstrip(b"\0").decode(errors="ignore") for buffer in buffers]

    if rank:
        exchange(True, [0], [error])
        return exchange(False, [0], [""])[0]
    others = range(1, ranks)
    errors = [error, *exchange(False, others, [""] * len(others))]
    outcome = next((each for each in errors if each), "") or publish()
    exchange(True, others, [outcome] * len(others))
    return outcome


def _encoded(text: str) -> bytes:
    return text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")


def _contents(folder: str) -> str:
    return os.path.join(folder, ".metadata")


def _part(folder: str, rank: int) -> str:
    return os.path.join(folder, f"part-{rank}.json")
