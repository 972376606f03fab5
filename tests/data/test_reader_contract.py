"""Abilities of readers: declared by a record, or by attributes as readers once had them."""

from types import SimpleNamespace

import numpy as np

from dlio.data.flow import Flow
from dlio.data.reader_contract import (
    Abilities,
    PathRules,
    abilities_of,
    data_bytes,
    path_rules_of,
    reads_alone,
)
from dlio.data.schema import Schema
from dlio.testing import MemoryReader


def test_a_reader_that_declares_nothing_has_the_defaults() -> None:
    assert abilities_of(SimpleNamespace()) == Abilities()
    assert path_rules_of(SimpleNamespace) == PathRules()


def test_a_reader_of_another_package_may_have_attributes_in_place_of_the_record() -> None:
    flow = Flow(8)
    reader = SimpleNamespace(flow=flow, sizes_are_estimates=True, files_are_samples=True)
    expected = Abilities(flow=flow, sizes_are_estimates=True, files_are_samples=True)
    assert abilities_of(reader) == expected
    kind = SimpleNamespace(single=True, fallback=True, objects_only=True)
    assert path_rules_of(kind) == PathRules(one_path=True, is_fallback=True, takes_objects=True)


def test_the_record_is_what_counts_where_there_is_one() -> None:
    reader = SimpleNamespace(abilities=Abilities(random_access=True), sizes_are_estimates=True)
    assert abilities_of(reader) == Abilities(random_access=True)


def test_bytes_of_a_data_set_are_summed_unless_they_are_known() -> None:
    reader = MemoryReader(Schema((("x", "int64"),)), [{"x": k} for k in range(5)])
    assert data_bytes(reader) == int(np.sum(reader.sizes)) == 40
    reader.abilities = Abilities(data_bytes=7, random_access=True)  # type: ignore[attr-defined]
    assert data_bytes(reader) == 7
    assert reads_alone(reader)
