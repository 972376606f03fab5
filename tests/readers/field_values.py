"""All values that dlio reads of a file, by field, to compare with those of the format's library."""

from typing import Any

import numpy as np

from dlio.data.reader import open_reader


def values_of(path: str) -> dict[str, list[Any]]:
    """Return the values of each field, one a sample."""
    reader = open_reader(path)
    try:
        rows = [reader.schema.split(each) for each in reader.read(np.arange(len(reader)))]
        return {name: [row[name] for row in rows] for name, _ in reader.schema.fields}
    finally:
        reader.close()
