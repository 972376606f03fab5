"""Folders of checkpoints, of which the newest was damaged."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dlio.comm.single import SingleCommunicator
from dlio.train.checkpoint.checkpoint_store import Checkpoints
from tests.hostile.corpus.case import RIGHT, Ask, Case, Cases, Make
from tests.hostile.corpus.mutate import SPECIAL, VALUES, damaged, nonsense, special_files

_NEW, OLD = "step-00000002", "step-00000001"
_MADE: dict[str, Path] = {}


def sound(folder: Path) -> Ask:
    """Two checkpoints of a few tensors."""
    target = folder / "c"
    if "c" in _MADE and _MADE["c"].is_dir():
        shutil.copytree(_MADE["c"], target)
    else:
        with Checkpoints(str(target), SingleCommunicator()) as checkpoints:
            for step in (1, 2):
                tensors = {
                    "all/w": torch.full((64,), float(step)),
                    "all/b": torch.zeros(3, 5),
                    "all/none": torch.zeros(0),
                    "rank0/r": torch.arange(100),
                }
                checkpoints.save(step, tensors, {"epoch": step, "loader": {"position": 3}})
                checkpoints.wait()
    return Ask("checkpoint", str(target), {"marks": {OLD: 1, _NEW: 2}})


def keep_sound(folder: Path) -> None:
    """Make the checkpoints once; cases copy them."""
    sound(folder)
    _MADE["c"] = folder / "c"


def _changed(change: Callable[[Path], object]) -> Make:
    def make(folder: Path) -> Ask:
        ask = sound(folder)
        change(folder / "c" / _NEW)
        return ask

    return make


def _about(text: str) -> Make:
    return _changed(lambda path: (path / "about.json").write_text(text))


def _metadata(change: Callable[[Any], Any]) -> Make:
    def changed(path: Path) -> None:
        value = pickle.loads((path / ".metadata").read_bytes())
        value = change(value)
        (path / ".metadata").write_bytes(pickle.dumps(value))

    return _changed(changed)


def _of_tensor(name: str, **values: Any) -> Make:
    """Replace attributes of a tensor's metadata."""

    def change(metadata: Any) -> Any:
        entry = metadata.state_dict_metadata[name]
        for key, value in values.items():
            setattr(entry, key, value)
        return metadata

    return _metadata(change)


def _of_place(**values: Any) -> Make:
    """Replace where all tensors lie in their file."""

    def change(metadata: Any) -> Any:
        for place in metadata.storage_data.values():
            for key, value in values.items():
                object.__setattr__(place, key, value)
        return metadata

    return _metadata(change)


class _Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        import os

        return os.system, ("touch /tmp/hostile-checkpoint",)


def _set(**values: Any) -> Make:
    def change(metadata: Any) -> Any:
        for key, value in values.items():
            setattr(metadata, key, value)
        return metadata

    return _metadata(change)


def _both(folder: Path) -> Ask:
    ask = sound(folder)
    for name in (_NEW, OLD):
        (folder / "c" / name / "about.json").write_text("{}")
    return ask


def _others(folder: Path) -> Ask:
    ask = sound(folder)
    for name in (
        "step-99999999",
        "step-00000009.tmp",
        "x",
        ".unfinished-x",
        "step-12345678901234567890",
    ):
        (folder / "c" / name).mkdir()
    (folder / "c" / "step-00000008").write_text("not a folder")
    (folder / "c" / ".unfinished-file").write_text("not a folder")
    return ask


def cases() -> Cases:
    """Return the cases of checkpoints."""
    yield Case("checkpoint/sound", sound, RIGHT, _NEW)
    for victim in ("about.json", ".metadata", "__0_0.distcp"):
        for kind in SPECIAL:
            each = next(
                special_files(
                    "checkpoint", sound, f"c/{_NEW}/{victim}", but=tuple(set(SPECIAL) - {kind})
                )
            )
            yield Case(each.name.replace("c-step-00000002-", ""), each.make, RIGHT, OLD)

        def gone(path: Path, victim: str = victim) -> None:
            (path / victim).unlink()

        yield Case(f"checkpoint/{victim}-missing", _changed(gone), RIGHT, OLD)
    folder = special_files("checkpoint", sound, f"c/{_NEW}", but=("outside",))
    yield from (Case(each.name, each.make, RIGHT, OLD) for each in folder)
    for victim, count in (("__0_0.distcp", 36), (".metadata", 48)):
        for each in damaged("checkpoint", sound, f"c/{_NEW}/{victim}", count):
            yield Case(each.name, each.make, RIGHT, "step-0000000")
    yield from damaged("checkpoint", sound, f"c/{_NEW}/about.json", 12)
    yield from nonsense("checkpoint", sound, f"c/{_NEW}/about.json", 40)
    for name, text in {
        "empty": "",
        "list": "[]",
        "null": "null",
        "number": "5",
        "deep": "[" * 100_000,
        "no-ranks": '{"format": 1, "step": 2}',
        "ranks-text": '{"format": 1, "step": 2, "ranks": "x"}',
        "ranks-list": '{"format": 1, "step": 2, "ranks": []}',
        "ranks-zero": '{"format": 1, "step": 2, "ranks": 0}',
        "ranks-negative": '{"format": 1, "step": 2, "ranks": -1}',
        "ranks-huge": '{"format": 1, "step": 2, "ranks": 1000000000000}',
        "ranks-float": '{"format": 1, "step": 2, "ranks": 1.5}',
        "ranks-infinite": '{"format": 1, "step": 2, "ranks": Infinity}',
        "ranks-null": '{"format": 1, "step": 2, "ranks": null}',
        "format-other": '{"format": 99, "step": 2, "ranks": 1}',
        "format-list": '{"format": [1], "step": 2, "ranks": 1}',
        "digits": '{"format": ' + "9" * 6000 + "}",
        "not-utf8": "\udcff",
    }.items():
        data = text.encode("utf-8", "surrogateescape")
        broken = _changed(lambda path, data=data: (path / "about.json").write_bytes(data))  # type: ignore[misc]
        yield Case(f"checkpoint/about-{name}", broken, RIGHT, OLD)
    tensors: dict[str, dict[str, Any]] = {
        "size-huge": {"size": torch.Size([10**12])},
        "size-negative": {"size": torch.Size([-1])},
        "size-other": {"size": torch.Size([32])},
        "size-list": {"size": [64]},
        "size-none": {"size": None},
        "size-text": {"size": "abc"},
        "properties-none": {"properties": None},
        "chunks-none": {"chunks": None},
        "chunks-empty": {"chunks": []},
        "chunks-text": {"chunks": "abc"},
        "chunks-many": {"chunks": [1] * 1000},
    }
    for name, values in tensors.items():
        yield Case(f"checkpoint/tensor-{name}", _of_tensor("all/w", **values), RIGHT, OLD)
    places: dict[str, dict[str, Any]] = {
        "path-outside": {"relative_path": "../../../../etc/passwd"},
        "path-absolute": {"relative_path": "/etc/passwd"},
        "path-device": {"relative_path": "/dev/zero"},
        "path-none": {"relative_path": None},
        "path-number": {"relative_path": 5},
        "path-nul": {"relative_path": "a\0b"},
        "offset-negative": {"offset": -5},
        "offset-huge": {"offset": 2**62},
        "offset-text": {"offset": "x"},
        "length-huge": {"length": 2**40},
        "length-negative": {"length": -1},
        "length-zero": {"length": 0},
        "length-none": {"length": None},
        "transforms": {"transform_descriptors": ["zstd"]},
    }
    for name, values in places.items():
        yield Case(f"checkpoint/place-{name}", _of_place(**values), RIGHT, OLD)
    odd: list[Any] = [None, {}, [], 5, "x", {"a": 1}, {1: 2}, {None: None}]
    for key in ("state_dict_metadata", "storage_data", "planner_data"):
        for k, other in enumerate(odd):
            whole = key == "planner_data"  # Not needed.
            yield Case(
                f"checkpoint/{key}-{k}",
                _set(**{key: other}),
                RIGHT,
                "step-0000000" if whole else OLD,
            )
    objects: dict[str, Any] = {
        "object": _Evil(),
        "in-planner": {"a": _Evil()},
        "number": 5,
        "none": None,
        "list": [[]] * 3,
        "getattr": torch.float32,
    }
    for name, value in objects.items():
        yield Case(f"checkpoint/pickle-{name}", _metadata(lambda _, v=value: v), RIGHT, OLD)  # type: ignore[misc]
    for name, raw in {
        "memo": b"\x80\x04r\xff\xff\xff\x7f.",
        "long": b"\x80\x04\x8b\xff\xff\xff\x7f",
        "bytes": b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f",
        "frame": b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.",
        "string": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
        "pop": b"0.",
        "persistent": b"Px\n.",
        "extension": b"\x80\x02\x82\x01.",
        "nested": b"\x80\x04" + b"]" * 200_000 + b"a" * 199_999 + b".",
        "doubling": b"\x80\x04]" + b"(" + b"]" + b"2" * 60 + b"t.",
        "build": b"\x80\x04}(X\x01\x00\x00\x00aK\x01ub.",
        "tensor-size": b"\x80\x04ctorch\nSize\nJ\xff\xff\xff\x7f\x85R.",
        "ordered": b"\x80\x04ccollections\nOrderedDict\n)R}b.",
    }.items():
        written = _changed(lambda path, raw=raw: (path / ".metadata").write_bytes(raw))  # type: ignore[misc]
        yield Case(f"checkpoint/opcode-{name}", written, RIGHT, OLD)
    yield Case("checkpoint/both", _both, RIGHT, "none")
    yield Case("checkpoint/others", _others, RIGHT, _NEW)
    for k, json_value in enumerate(VALUES):
        text = json.dumps(json_value)
        yield Case(f"checkpoint/about-value-{k}", _about(text), RIGHT, OLD)
