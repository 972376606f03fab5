"""The newest state of a run that the living nodes have together in their memory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

import numpy as np
import torch

from dlio.agent.snapshot import Stored, stored, writers
from dlio.comm import Communicator

__all__ = ["COMMON", "MEMBER", "Choice", "Part", "SnapshotState", "choose", "newest_state"]

COMMON: Final = "common"
"""Writer of the tensors that are equal on all ranks."""
MEMBER: Final = "rank-"
"""Beginning of the writer of a rank's own tensors; its number follows."""


class Part(TypedDict):
    """One whole slot, as ranks tell each other of it."""

    writer: str
    turn: int
    text: int
    """Bytes."""
    data: int
    """Bytes."""
    alike: bool
    """True if the model is in the common part."""
    members: list[int]
    """Numbers of the ranks that were alive."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The slots that make a state."""

    turn: int
    """Of the common part."""
    members: dict[int, int]
    """Turn of each saved rank's part, by its number."""
    newest: int
    """Newest turn of any part."""


def choose(parts: Sequence[Part]) -> Choice | None:
    """Choose the newest state that is whole; None if there is none. Pure.

    All parts are of one turn, the newest that all ranks of living nodes have, unless one of them
    lags behind. Where each rank has a model of its own, ranks may be at different steps: then the
    place in the epoch is that of the slowest, and each rank's part its newest.

    Args:
        parts: of all living nodes.
    """
    common = {part["turn"]: part for part in parts if part["writer"] == COMMON}
    own: dict[int, set[int]] = {}
    for part in parts:
        if part["writer"].startswith(MEMBER):
            own.setdefault(int(part["writer"].removeprefix(MEMBER)), set()).add(part["turn"])
    if not common:
        return None
    newest = max(part["turn"] for part in parts)
    turns = sorted(common, reverse=True)

    def having(turn: int) -> dict[int, int]:
        """Parts that belong to a common part."""
        members = sorted(member for member in common[turn]["members"] if member in own)
        if not common[turn]["alike"]:
            return {member: max(own[member]) for member in members}
        return {member: turn for member in members if turn in own[member]}

    def complete(turn: int) -> bool:
        return len(having(turn)) == len([m for m in common[turn]["members"] if m in own])

    if not common[turns[0]]["alike"]:
        # A slow rank may be behind all common parts of its node.
        slowest = min(having(turns[0]).values(), default=newest)
        turn = next((each for each in turns if each <= slowest), turns[-1])
        return Choice(turn, having(turn), newest)
    turn = next((each for each in turns if complete(each)), turns[0])
    return Choice(turn, having(turn), newest)


@dataclass(frozen=True, slots=True)
class SnapshotState:
    """A state in memory; see `dlio.train.checkpoint.state.SavedState`."""

    path: str
    ranks: int
    about: Mapping[str, object]
    is_of_one_step: bool
    turn: int
    newest: int
    """Newest turn that any of the living nodes has seen."""
    tensors: Mapping[str, torch.Tensor]

    def read(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return the tensors whose names begin with `prefix`, without it."""
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }


def newest_state(comm: Communicator, folder: str) -> SnapshotState | None:
    """Return the newest state of the nodes; None if there is none. Collective.

    Args:
        folder: of this node's snapshots.
    """
    folders = comm.allgather(folder)
    leads = folders.index(folder) == comm.rank
    here = {name: stored(folder, name) for name in (writers(folder) if leads else ())}
    listings: list[list[Any]] = comm.allgather(
        [_part(name, slot) for name, slots in here.items() for slot in slots]
    )
    choice = choose([part for parts in listings for part in parts])
    if choice is None:
        return None
    wanted = [(COMMON, choice.turn)]
    wanted += [(f"{MEMBER}{member}", turn) for member, turn in choice.members.items()]
    tensors: dict[str, torch.Tensor] = {}
    about: Mapping[str, Any] = {}
    for number, (writer, turn) in enumerate(wanted):
        having = {
            rank: part
            for rank, parts in enumerate(listings)
            for part in parts
            if (part["writer"], part["turn"]) == (writer, turn)
        }
        root = min(having)
        local = {folders[rank] for rank in having}
        mine = None
        if folder in local:
            # The first rank of the node has compared its checksum.
            slots = stored(folder, writer, check=False)
            mine = next((s for s in slots if s.turn == turn), None)
        text = _everywhere(comm, mine, root, having[root], set(folders) <= local)
        head = json.loads(text[0])
        if not number:
            about = head["about"]
        prefix = "all/" if not number else f"rank{number - 1}/"
        for name, kind, shape, first, size in head["tensors"]:
            piece = torch.from_numpy(text[1][first : first + size])
            tensors[f"{prefix}{name}"] = piece.view(getattr(torch, kind)).view(shape)
    return SnapshotState(
        path="the nodes' memory",
        ranks=len(choice.members),
        about=about,
        is_of_one_step=set(choice.members.values()) <= {choice.turn},
        turn=choice.turn,
        newest=choice.newest,
        tensors=tensors,
    )


def _part(writer: str, slot: Stored) -> Part:
    head = json.loads(slot.text)
    return {
        "writer": writer,
        "turn": slot.turn,
        "text": len(slot.text),
        "data": len(slot.data),
        "alike": head["alike"],
        "members": head["members"],
    }


def _everywhere(
    comm: Communicator, mine: Stored | None, root: int, part: Part, is_local: bool
) -> tuple[bytes, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return a slot's text and data on all ranks. Collective unless each node has it.

    Args:
        mine: the slot as this node has it.
        root: a rank whose node has it.
        is_local: True if all nodes have it.
    """
    if is_local:
        assert mine is not None
        # Not copied: ranks that were started again write to slots of their own.
        return mine.text, np.frombuffer(mine.data, np.uint8)
    # Texts of nodes differ in the times that each has measured, and in length.
    text, data = np.empty(part["text"], np.uint8), np.empty(part["data"], np.uint8)
    if comm.rank == root:
        assert mine is not None
        text[:], data = np.frombuffer(mine.text, np.uint8), np.frombuffer(mine.data, np.uint8)
    for array in (text, data):
        if len(array):
            comm.bcast(array, root)
    return text.tobytes(), data
