"""Differences of two runs of a script: printed lines, files and weights."""

import filecmp
import importlib
import os
import re
import sys
from typing import Any, Final

import torch

_NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_STORED: Final = (".pt", ".pth", ".tar", ".bin", ".ckpt", ".safetensors")
_WORDS: Final = 200
_ROUNDING: Final = 1e-6


def differing_lines(one: str, other: str, times: str) -> list[str]:
    """Return the lines of two texts that are not the same, `one | other`.

    Args:
        times: regular expression of parts that are not compared.
    """
    first, second = (re.sub(times, "TIME", text).splitlines() for text in (one, other))
    length = max(len(first), len(second))
    for lines in (first, second):
        lines += ["(no line)"] * (length - len(lines))
    return [f"{a[:_WORDS]} | {b[:_WORDS]}" for a, b in zip(first, second, strict=True) if a != b]


def largest_number_difference(lines: list[str]) -> float:
    """Return the largest relative difference of numbers at the same places of `differing_lines`.

    Infinity if a pair of lines differs in more than its numbers.
    """
    largest = 0.0
    for line in lines:
        one, other = line.split(" | ", 1) if line.count(" | ") == 1 else _halves(line)
        if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
            return float("inf")
        for a, b in zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True):
            size = max(abs(float(a)), abs(float(b)), 1e-9)
            largest = max(largest, abs(float(a) - float(b)) / size)
    return largest


def _halves(line: str) -> tuple[str, str]:
    """Split a pair of lines that have bars themselves, equally many."""
    parts = line.split(" | ")
    half = len(parts) // 2
    return " | ".join(parts[:half]), " | ".join(parts[half:])


def differing_files(one: str, other: str) -> tuple[list[str], float]:
    """Return the files below two folders that differ, and the largest difference of stored tensors.

    Files with tensors differ if their structure does; their values are in the second result.
    """
    names = [_names(folder) for folder in (one, other)]
    differing = [f"{name} (in one of the two)" for name in sorted(names[0] ^ names[1])]
    largest = 0.0
    for name in sorted(names[0] & names[1]):
        first, second = os.path.join(one, name), os.path.join(other, name)
        if filecmp.cmp(first, second, shallow=False):
            continue
        if name.endswith(_STORED):
            stored = [load_tensors(path) for path in (first, second)]
            if stored[0].keys() != stored[1].keys():
                differing.append(f"{name} (other entries)")
            else:
                largest = max(largest, largest_difference(*stored)[0])
        else:
            differing.append(name)
    return differing, largest


def _names(folder: str) -> set[str]:
    return {
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, names in os.walk(folder)
        for name in names
        if "__pycache__" not in place
    }


def load_tensors(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors and numbers in a file, by their place in its structure.

    The file may hold objects of classes that modules next to it define.
    """
    if path.endswith(".safetensors"):
        return dict(importlib.import_module("safetensors.torch").load_file(path))
    before, folder = set(sys.modules), os.path.dirname(path)
    sys.path.insert(0, folder)
    try:
        return _flat(torch.load(path, weights_only=False, map_location="cpu"))
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]


def _flat(stored: Any) -> dict[str, torch.Tensor]:
    if isinstance(stored, torch.nn.Module):
        stored = stored.state_dict()
    if isinstance(stored, torch.Tensor):
        return {"": stored.detach()}
    if isinstance(stored, int | float):
        return {"": torch.tensor(float(stored))}
    if isinstance(stored, dict | list | tuple):
        items = stored.items() if isinstance(stored, dict) else enumerate(stored)
        return {f"{key}.{name}": t for key, value in items for name, t in _flat(value).items()}
    return {}


def largest_difference(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """Return the largest difference of tensors of a name, as a part of its norm, and its name.

    Tensors that are nothing but rounding are left out, such as an attention's bias of keys, whose
    gradient is zero.
    """
    largest, worst = 0.0, ""
    for name in one.keys() & other.keys():
        if one[name].shape != other[name].shape:
            return float("inf"), name
        a, b = one[name].double(), other[name].double()
        size = max(a.norm().item(), b.norm().item())
        part = float((a - b).norm()) / size if size > _ROUNDING else 0.0
        if part > largest:
            largest, worst = part, name
    return largest, worst
