"""The parts of a checkpoint: any rank completes it, and all agree on how it ended. No MPI."""

import io
import json
import os
import queue
import threading
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from dlio.comm.comm_protocol import Buffer, Request
from dlio.errors import PeerLost, SourceError
from dlio.train.checkpoint.rank_parts import agree, complete, has_part, write_part
from dlio.train.checkpoint.tensor_reader import contents, read_tensors


def test_any_rank_completes_the_parts_and_another_goes_on_with_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "c")
    os.mkdir(folder)
    tensors = {"all/w": torch.arange(6.0).reshape(2, 3), "rank1/n": torch.tensor(7)}
    write_part(folder, 0, {"all/w": tensors["all/w"]})
    assert [has_part(folder, rank) for rank in (0, 1)] == [True, False]
    write_part(folder, 1, {"rank1/n": tensors["rank1/n"]})
    part = (tmp_path / "c" / "part-1.json").read_bytes()
    complete(folder, 2)
    # As if the rank that completed it had been lost before it had removed what describes a part.
    (tmp_path / "c" / "part-1.json").write_bytes(part)
    assert has_part(folder, 0)
    complete(folder, 2)
    assert set(contents(folder)) == set(tensors)
    read = read_tensors(folder, tensors)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert read["rank1/n"].dtype is torch.int64
    assert not list((tmp_path / "c").glob("part-*"))


def test_compressed_tensors_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    folder, file = str(tmp_path), tmp_path / "__0_0.distcp"
    write_part(folder, 0, {"all/w": torch.zeros(64)})
    packed = io.BytesIO()
    with zipfile.ZipFile(file) as source, zipfile.ZipFile(packed, "w") as made:
        for entry in source.infolist():
            data = bytes(1 << 20) if entry.filename.endswith("data/0") else source.read(entry)
            made.writestr(entry.filename, data, zipfile.ZIP_DEFLATED)
    file.write_bytes(packed.getvalue())
    part = tmp_path / "part-0.json"
    entries = json.loads(part.read_text())
    entries["all/w"]["length"] = len(packed.getvalue())
    part.write_text(json.dumps(entries))
    complete(folder, 1)
    with pytest.raises(SourceError, match="compressed"):
        read_tensors(folder, ["all/w"])


class _Message:
    """A request that is done once its message is there."""

    def __init__(self, mail: "queue.Queue[bytes]", into: Buffer | None) -> None:
        self._mail, self._into = mail, cast(Any, into)

    def done(self) -> bool:
        if self._into is not None:
            memoryview(self._into)[:] = self._mail.get(timeout=400)
            self._into = None
        return True

    def cancel(self) -> bool:
        return True


class _Post:
    """Messages of one of several threads."""

    def __init__(self, boxes: Any, rank: int) -> None:
        self._boxes, self._rank = boxes, rank

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        self._boxes[self._rank, dest, tag].put(bytes(data))
        return _Message(queue.Queue(), None)

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        return _Message(self._boxes[source, self._rank, tag], into)


@pytest.mark.parametrize(
    ("errors", "published", "outcome"),
    [
        (["", "", ""], "", ""),
        (["", "rank 1: no space", ""], "", "rank 1: no space"),
        (["", "", ""], "cannot be renamed", "cannot be renamed"),
        (["x" * 3000, "", ""], "", "x" * 1024),
    ],
)
def test_all_ranks_agree_on_how_a_checkpoint_ended(
    errors: list[str], published: str, outcome: str
) -> None:
    boxes: Any = defaultdict(queue.Queue)
    ended: dict[int, str] = {}
    calls: list[int] = []

    def wait(requests: Sequence[Request]) -> None:
        for request in requests:
            request.done()

    def run(rank: int) -> None:
        def publish() -> str:
            calls.append(rank)
            return published

        ended[rank] = agree(_Post(boxes, rank), rank, 3, errors[rank], publish, wait)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {each[:1024] for each in ended.values()} == {outcome}
    assert len(ended) == 3
    assert calls == ([] if any(errors) else [0])


class _PostAmongLosses(_Post):
    """The same; to a rank that is gone no message can be begun."""

    def __init__(self, boxes: Any, rank: int, gone: list[int]) -> None:
        super().__init__(boxes, rank)
        self._gone = gone

    def isend(self, data: Buffer, dest: int, tag: int) -> Request:
        self._look(dest)
        return super().isend(data, dest, tag)

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        self._look(source)
        return super().irecv(into, source, tag)

    def _look(self, other: int) -> None:
        if other in self._gone:
            raise PeerLost(f"rank {other} is gone")


@pytest.mark.parametrize("early", [True, False])
def test_a_rank_that_waits_for_the_first_is_told_of_a_loss_that_only_that_one_sees(
    early: bool,
) -> None:
    """Rank 1 is lost, `early` before it has written its part, or else before it is told the end."""
    boxes: Any = defaultdict(queue.Queue)
    gone = [1] if early else []
    ended: dict[int, str] = {}

    def wait(requests: Sequence[Request]) -> None:
        for request in requests:
            request.done()

    def run(rank: int) -> None:
        def publish() -> str:
            gone.append(1)
            return "a reason"

        try:
            ended[rank] = agree(_PostAmongLosses(boxes, rank, gone), rank, 3, "", publish, wait)
        except PeerLost:
            ended[rank] = "lost"

    boxes[1, 0, 1].put(bytes(1024))
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ended == {0: "lost", 2: "lost" if early else "a reason"}
