"""The names by which a sample's label field is recognised, the same for all formats.

A reader takes the first of `LABEL_NAMES` among its fields. Formats with a convention of their own
have a list of their own here, next to the common one.
"""

from typing import Final

# The last one is the second item of a sample that is a tuple, such as (image, label).
# fmt: off
LABEL_NAMES: Final = (
    "label", "labels", "cls", "class", "target", "targets", "fine_label", "y", "1"
)
# fmt: on
"""Label fields, in the order of preference."""
TAR_LABEL_NAMES: Final = ("label", "cls", "id", "index")
"""Suffixes of tar members: WebDataset's `cls`, and the number where a sample has nothing else."""
TABLE_LABEL_NAMES: Final = ("label", "class", "target", "category", "labels")
"""Columns of the table of labels that may lie in an image folder (labels.csv, metadata.csv)."""
