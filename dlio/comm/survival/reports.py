"""Reports: where each part of a training stands on a rank when another one is lost.

Each kind of report is a frozen dataclass next to the part that makes it. Reports travel to all
survivors as JSON, together with the vote on the next generation, so their fields are numbers and
tuples of numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from dlio.comm.comm_protocol import Json


@dataclass(frozen=True, slots=True)
class Report:
    """The report of a part without any state of its own, and the base class of all others."""

    kinds: ClassVar[dict[str, "type[Report]"]] = {}
    """All kinds of reports of this process, by name."""

    def __init_subclass__(cls) -> None:
        Report.kinds[cls.__name__] = cls

    def to_json(self) -> dict[str, Json]:
        """Return the report as JSON types."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"kind": type(self).__name__, **values}


Report.kinds[Report.__name__] = Report


def report_from_json(wire: Mapping[str, Json]) -> Report:
    """Return the report that `to_json` has described."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in wire.items()
    }
    return Report.kinds[values.pop("kind")](**values)
