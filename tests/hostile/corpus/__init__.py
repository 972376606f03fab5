"""Hostile data, made by code: one module a format, each with a function `cases`."""

from types import ModuleType
from typing import Final

from tests.hostile.corpus import (
    annotated,
    arrayfiles,
    arrows,
    checkpoints,
    compressed,
    folder,
    hdf5,
    idxfiles,
    mds,
    parquets,
    scans,
    shards,
    tables,
    tars,
    tfrecords,
    tiers,
    tokenfiles,
    xmlfiles,
    zarrs,
    zips,
)
from tests.hostile.corpus.case import Case

__all__ = ["MODULES", "all_cases"]

MODULES: Final[tuple[ModuleType, ...]] = (
    folder,
    tables,
    hdf5,
    zarrs,
    parquets,
    mds,
    tars,
    shards,
    tiers,
    checkpoints,
    arrayfiles,
    tfrecords,
    arrows,
    annotated,
    xmlfiles,
    idxfiles,
    scans,
    compressed,
    zips,
    tokenfiles,
)


def all_cases() -> list[Case]:
    """Return all cases, in the order of formats."""
    return [case for module in MODULES for case in module.cases()]
