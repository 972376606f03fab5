"""Attacks that apply to files of every format."""

import copy
import json
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from tests.hostile.corpus.case import ANY, ERROR, Ask, Case, Expected

__all__ = ["damaged", "nonsense", "special_files"]

Sound = Callable[[Path], Ask]
"""Writes an intact data set into an empty folder."""
VALUES: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 2**31, 2**63, 10**30, 1e308, float("nan")),
    *("", "x", "../../etc/passwd", "\x1b[31m\n\r", "\ud800", "\0", "9" * 5000),
    *([], {}, [None], [[1]], {"a": 1}),
)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # Names of sockets are short.
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


SPECIAL: Final[dict[str, Callable[[Path], object]]] = {
    "fifo": _fifo,
    "socket": _socket,
    "device-zero": _to("/dev/zero"),
    "device-random": _to("/dev/urandom"),
    "standard-input": _to("/dev/stdin"),
    "proc-mem": _to("/proc/self/mem"),
    "dangling": _to("nothing-here"),
    "link-loop": _loop,
    "outside": _to("SECRET"),
    "folder": lambda path: path.mkdir(),
    "empty": lambda path: path.write_bytes(b""),
    "sparse": _sparse,
}


def special_files(
    room: str, sound: Sound, victim: str, expected: Expected = ERROR, *, but: tuple[str, ...] = ()
) -> Iterator[Case]:
    """Replace one file of a data set by something that is not a regular file.

    Args:
        room: name of the format.
        sound: writes the data set.
        victim: name of the file, or a pattern of which the first match counts.
        but: attacks to leave out.
    """

    def replaced(kind: str) -> Callable[[Path], Ask]:
        def make(folder: Path) -> Ask:
            ask = sound(folder)
            path = min(folder.glob(victim))
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            if kind == "outside":  # A link to a file elsewhere, such as a key of the user's.
                (folder / "secret").write_bytes(b"secret" * 100)
                path.symlink_to(folder / "secret")
            else:
                SPECIAL[kind](path)
            return ask

        return make

    short = victim.replace("*", "").strip("./").replace("/", "-") or "all"
    for kind in SPECIAL:
        if kind not in but:
            yield Case(f"{room}/{short}-{kind}", replaced(kind), expected)


def damaged(
    room: str, sound: Sound, victim: str, count: int = 10, expected: Expected = ANY
) -> Iterator[Case]:
    """Cut a file of a data set, flip its bits, or overwrite parts of it."""

    def changed(kind: str, seed: int) -> Callable[[Path], Ask]:
        def make(folder: Path) -> Ask:
            ask = sound(folder)
            path = min(folder.glob(victim))
            data = bytearray(path.read_bytes())
            draw = random.Random(f"{room} {victim} {kind} {seed}")
            if kind == "cut":
                del data[draw.randrange(len(data)) :]
            elif kind == "flip":
                for _ in range(draw.choice((1, 3, 20))):
                    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            elif kind == "large":
                at = draw.randrange(len(data))
                data[at : at + 8] = b"\xff" * 7 + b"\x7f"
            elif kind == "head":
                data[draw.randrange(min(64, len(data)))] ^= 1 << draw.randrange(8)
            elif kind == "tail":
                data[-1 - draw.randrange(min(64, len(data)))] ^= 1 << draw.randrange(8)
            else:
                at = draw.randrange(len(data))
                data[at:at] = draw.randbytes(draw.choice((1, 8, 100)))
            path.write_bytes(data)
            return ask

        return make

    kinds = ("cut", "flip", "large", "head", "tail", "insert")
    short = victim.replace("*", "").strip("./").replace("/", "-") or "all"
    for k in range(count):
        kind = kinds[k % len(kinds)]
        yield Case(f"{room}/{short}-{kind}-{k // len(kinds)}", changed(kind, k), expected)


def nonsense(
    room: str,
    sound: Sound,
    victim: str,
    count: int = 12,
    expected: Expected = ANY,
    *,
    load: Callable[[Path], Any] = lambda path: json.loads(path.read_text()),
    save: Callable[[Path, Any], object] = lambda path, value: path.write_text(json.dumps(value)),
) -> Iterator[Case]:
    """Replace values of metadata in JSON by values of other types and sizes.

    Args:
        load: reads the metadata of a file.
        save: writes them back.
    """

    def changed(seed: int) -> Callable[[Path], Ask]:
        def make(folder: Path) -> Ask:
            ask = sound(folder)
            path = min(folder.glob(victim))
            value = load(path)
            places = list(_places(value))
            draw = random.Random(f"{room} {victim} {seed}")
            holder, key = places[seed % len(places)]
            if draw.random() < 0.15:
                del holder[key]
            else:
                holder[key] = copy.deepcopy(draw.choice(VALUES))
            save(path, value)
            return ask

        return make

    short = victim.replace("*", "").strip("./").replace("/", "-") or "all"
    for k in range(count):
        yield Case(f"{room}/{short}-nonsense-{k}", changed(k * 7 + 1), expected)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])
