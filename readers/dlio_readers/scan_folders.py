"""Other meanings of folders of scans than classes, and tables next to scans, which are not read.

sub-01/anat/sub-01_T1w.nii.gz, sub-01/func/...      kinds of scans of BIDS
patient1/IM0001, patient1/IM0002, patient2/...      slices of a series
scans/1.nii.gz, labels.csv                          labels in a table
"""

from collections.abc import Mapping, Sequence
from typing import Final

from dlio.data.interpretation import named_files
from dlio.data.source import Source, own_name
from dlio.errors import SourceError, UsageError
from dlio_readers.dicom import DICOM_SUFFIXES, may_be_dicom, series_of
from dlio_readers.unread_labels import files_of_labels

# fmt: off
_KINDS: Final = frozenset((
    "anat", "func", "dwi", "fmap", "perf", "pet", "meg", "eeg", "ieeg", "beh", "micr", "nirs",
    "mrs", "motion",
))
# fmt: on
"""Folders of kinds of scans, as BIDS calls them."""
_PARTS: Final = ("sub-", "ses-")
_LOOKED_AT: Final = 2
"""Folders whose scans are compared."""
_TABLES: Final = (".csv", ".tsv")
_ID: Final = b"UID"
_PERSONS: Final = "participants."
"""Begins the name of BIDS' table of persons."""


def check_kinds(source: Source, folders: Sequence[str]) -> None:
    """Raise UsageError for folders of BIDS, which are kinds of scans, or persons and sessions, and
    no classes."""
    if not set(folders) & _KINDS and not any(name.startswith(_PARTS) for name in folders):
        return
    first = next((name for name in folders if name in _KINDS or name.startswith(_PARTS)), "")
    rows = sorted(source.names(first))
    scan = next((name for name, folder in rows if not folder and name.startswith("sub-")), "")
    if scan:
        pattern = f"{source.path()}/{'*' if first not in _KINDS else first}/*_{scan.split('_')[-1]}"
        raise UsageError(
            f"{source.path()}: {', '.join(folders[:3])} are folders of BIDS, and no classes: open "
            f"one, such as {source.path(first)}, or a pattern, such as {pattern!r}; "
            "layout='classes' takes them for classes"
        )


def doubts_of_scans(source: Source, scans: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the words about class folders whose scans say that they are none, by the names of the
    files in each."""
    counts = {name: len(own) for name, own in scans.items() if own}
    if len(counts) > 1 and set(counts.values()) == {1}:
        return [
            "each of these folders holds one file, as cases do: their labels are the folders all "
            "the same; open a pattern of the files to read them without"
        ]
    series: list[str] = []
    for folder, own in list(scans.items())[:_LOOKED_AT]:
        slices = [name for name in own if name.lower().endswith(DICOM_SUFFIXES)]
        slices = slices or [name for name in own if may_be_dicom(name)]
        if len(slices) < 2:
            return []
        try:
            both = {series_of(source.file(f"{folder}/{name}")) for name in (slices[0], slices[-1])}
        except (SourceError, UsageError):
            return []  # The reader says why they cannot be read.
        if len(both) > 1 or "" in both:
            return []
        series += both
    if len(set(series)) < 2:
        return []
    return [
        "files of each of these folders are of one series, as the slices of a scan are: their "
        "labels are the folders all the same, and not what is seen"
    ]


def tables_of_scans(source: Source, names: Sequence[str], folder: str = "") -> list[str]:
    """Return the tables next to scans, or to their `folder`, that may label them."""
    files = source.files()
    tables = [name for name in files if name.lower().endswith(_TABLES)]
    stems = [name.removesuffix(".gz") for name in names]
    known = files_of_labels(source, "", stems, is_strict=bool(folder))
    ids = [name for name in tables if name not in known and _ID in source.read(name, 0, 1 << 12)]
    return [n for n in tables if n in known or n in ids or n.startswith(_PERSONS)]


def words_of_tables(source: Source, tables: Sequence[str], *, are_lists: bool = False) -> str:
    """Return the words about tables that may label scans; lists of those next to them can be
    chosen."""
    words = f"{named_files(tables)} in {source.path()}, which may hold labels"
    if are_lists:
        return f"{words}: choose one with table= and label="
    return (
        f"{words}, and are not read: sort arrays and scans into one folder per class, or write a "
        "labels.csv, of file_name and label, next to those of one folder"
    )


def tables_above(url: str, names: Sequence[str]) -> str:
    """Return the words about tables next to a local folder of scans; "" without any."""
    source = Source(url)
    above = url.rstrip("/").rpartition("/")[0]
    if not source.local or not above:
        return ""
    try:
        outer = Source(above)
        tables = tables_of_scans(outer, names, own_name(url))
    except SourceError:
        return ""
    return words_of_tables(outer, tables) if tables else ""
