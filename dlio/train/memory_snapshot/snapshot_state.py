"""The newest state of a run that the living nodes have together in their memory."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

import numpy as np
import torch

from dlio.comm import Communicator
from dlio.launch.node.snapshot_slots import StoredSnapshot, stored, writers
from dlio.train.checkpoint.state import SavedState, tensors_at

COMMON: Final = "common"
"""Writer of the tensors that are equal on all ranks, and of the place in the run; where ranks step
without waiting for each other, each rank writes one, and `-` and its number follow."""
MEMBER: Final = "rank-"
"""Beginning of the writer of a rank's own tensors; its number follows."""


def turn_of(updates: int, is_between: bool) -> int:
    """Return the number of a place in a run, after some optimizer steps; it grows.

    It is another one between two epochs.
    """
    return 2 * updates + is_between


class SlotPart(TypedDict):
    """One whole slot, as ranks tell each other of it."""

    writer: str
    turn: int
    text: int
    """Bytes."""
    data: int
    """Bytes."""
    apart: bool
    """True if ranks step without waiting for each other: each writes a common part of its own."""
    era: list[int]
    """Times that all ranks had begun again, and the generation of those that were left."""
    members: list[int]
    """Numbers of the ranks that were alive."""


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """The slots that make a state."""

    turn: int
    """Of the common part."""
    members: dict[int, int]
    """Turn of each saved rank's part, by its number."""
    newest: int
    """Newest turn of any part, on all living nodes."""
    writer: str = COMMON
    """Of the common part."""
    start: int = 0
    """Times that all ranks had begun again before the common part was made."""


def choose(parts: Sequence[SlotPart]) -> SlotChoice | None:
    """Choose the newest state that is whole, of all living nodes' parts; None if there is none.
    Pure.

    All parts are of one turn, the newest that all ranks of living nodes have, unless one of them
    lags behind. Where ranks step without waiting for each other, the place is that of the rank that
    has come furthest, among those that knew of all losses, and each rank's part its newest: what a
    rank has not trained of the batches up to that place comes again.
    """
    common = [part for part in parts if part["writer"].startswith(COMMON)]
    own: dict[int, set[tuple[int, int]]] = {}
    for part in parts:
        if part["writer"].startswith(MEMBER):
            member = int(part["writer"].removeprefix(MEMBER))
            own.setdefault(member, set()).add(_course(part))
    if not common:
        return None
    newest = max(part["turn"] for part in parts)

    def having(part: SlotPart) -> dict[int, int]:
        """Parts that belong to a common part."""
        members = sorted(member for member in part["members"] if member in own)
        if not part["apart"]:
            return {member: part["turn"] for member in members if _course(part) in own[member]}
        before = {member: [t for _, t in own[member] if t <= part["turn"]] for member in members}
        return {member: max(turns) for member, turns in before.items() if turns}

    def complete(part: SlotPart) -> bool:
        return len(having(part)) == len([m for m in part["members"] if m in own])

    if common[0]["apart"]:
        chosen = max(common, key=lambda part: (part["era"], part["turn"], part["writer"]))
    else:
        common.sort(key=_course, reverse=True)
        chosen = next((part for part in common if complete(part)), common[0])
    start = chosen["era"][0]
    return SlotChoice(chosen["turn"], having(chosen), newest, chosen["writer"], start)


def _course(part: SlotPart) -> tuple[int, int]:
    """Return when all ranks had begun again that made a part, and its turn."""
    return part["era"][0], part["turn"]


@dataclass(frozen=True, slots=True)
class SnapshotState(SavedState):
    """A state in memory."""

    choice: SlotChoice
    reached: Mapping[int, int]
    """Turn up to which the steps of each rank are in the weights, by its number; nothing if all
    steps before the place are."""


def newest_state(comm: Communicator, folder: str) -> SnapshotState | None:
    """Return the newest state of the nodes, of which this one's snapshots are in `folder`; None if
    there is none. Collective."""
    folders = comm.allgather(folder)
    leads = folders.index(folder) == comm.rank
    here = {name: stored(folder, name) for name in (writers(folder) if leads else ())}
    listings: list[list[Any]] = comm.allgather(
        [_part(name, slot) for name, slots in here.items() for slot in slots]
    )
    choice = choose([part for parts in listings for part in parts])
    if choice is None:
        return None
    wanted = [(choice.writer, choice.turn)]
    wanted += [(f"{MEMBER}{member}", turn) for member, turn in choice.members.items()]
    tensors: dict[str, torch.Tensor] = {}
    about: Mapping[str, Any] = {}
    reached: dict[int, int] = {}
    for number, (writer, turn) in enumerate(wanted):
        held = [
            (rank, part)
            for rank, parts in enumerate(listings)
            for part in parts
            if (part["writer"], part["turn"]) == (writer, turn)
        ]
        # The same turn may have been reached twice, on two courses.
        starts = {part["era"][0] for _, part in held}
        start = choice.start if choice.start in starts else max(starts)
        having = {rank: part for rank, part in held if part["era"][0] == start}
        root = min(having)
        local = {folders[rank] for rank in having}
        mine = None
        if folder in local:
            # The first rank of the node has compared its checksum.
            slots = stored(folder, writer, check=False)
            own = having[folders.index(folder)]
            mine = next((s for s in slots if _part(writer, s) == own), None)
        text = _everywhere(comm, mine, root, having[root], set(folders) <= local)
        head = json.loads(text[0])
        if not number:
            about = head["about"]
        # Ranks of lost nodes left what others had taken in of theirs.
        for member, turn_heard in head["about"].get("heard", ()):
            reached[member] = max(turn_heard, reached.get(member, 0))
        prefix = "all/" if not number else f"rank{number - 1}/"
        placed = tensors_at(head["tensors"], text[1])
        tensors |= {f"{prefix}{name}": tensor for name, tensor in placed.items()}
    if choice.writer == COMMON:
        reached = {}
    else:
        reached |= choice.members
    return SnapshotState(
        "the nodes' memory",
        len(choice.members),
        about,
        choice,
        reached,
        is_of_one_step=set(choice.members.values()) <= {choice.turn},
        tensors=tensors,
    )


def _part(writer: str, slot: StoredSnapshot) -> SlotPart:
    head = json.loads(slot.text)
    return {
        "writer": writer,
        "turn": slot.turn,
        "text": len(slot.text),
        "data": len(slot.data),
        "apart": head["apart"],
        "era": head["era"],
        "members": head["members"],
    }


def _everywhere(
    comm: Communicator, mine: StoredSnapshot | None, root: int, part: SlotPart, is_local: bool
) -> tuple[bytes, np.ndarray[Any, np.dtype[np.uint8]]]:
    """Return a slot's text and data on all ranks. Collective unless each node has it (`is_local`).

    `mine` is the slot as this node has it; the node of rank `root` does.
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
