"""The reader of Parquet files, as Hugging Face data sets use them; decodes whole row groups."""

from collections.abc import Sequence
from typing import Any, Final

from dlio.data.reader_contract import PathRules
from dlio.data.source import File, ReadErrors, expand, files_below
from dlio.errors import SourceError
from dlio.util.limits import check_claim, is_plausible, parsing
from dlio_readers.partitions import Partitions, files_of_partitions
from dlio_readers.path_reader import lie_at, split_paths
from dlio_readers.rowgroups import ArrowTable, RowGroupReader, expanded_bytes

_SUFFIXES: Final = (".parquet", ".parq")
_WIDTHS: Final = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT96": 12}
"""Bytes that a value takes in memory at least, where these are not 8."""
_MOST_AT_ONCE: Final = 1 << 30
_PART_BYTES: Final = 64 << 20


class ParquetGroups:
    """The row groups of a Parquet file. Raises SourceError if it is damaged."""

    def __init__(self, file: File) -> None:
        import pyarrow.parquet as pq

        self._file = file
        damaged = ReadErrors(file.name, "is not a Parquet file, or is damaged")
        with damaged, file.for_library() as opened:
            self._opened = pq.ParquetFile(opened)
        self.schema: Any = self._opened.schema_arrow
        self.count = int(self._opened.metadata.num_row_groups)

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def table(self, group: int, names: Sequence[str]) -> ArrowTable:
        """Read columns of a row group as an Arrow table."""
        import pyarrow as pa

        size = sum(
            each.total_uncompressed_size
            for each in self._columns(group)
            if each.path_in_schema.split(".")[0] in names
        )
        if size < _MOST_AT_ONCE:
            return self._opened.read_row_group(group, columns=names, use_threads=False)
        # The library reads no nested columns of over 2 GiB at a time.
        rows = self._opened.metadata.row_group(group).num_rows
        parts = self._opened.iter_batches(
            max(1, rows * _PART_BYTES // size), [group], names, use_threads=False
        )
        return pa.Table.from_batches(list(parts))

    def _columns(self, group: int) -> list[Any]:
        facts = self._opened.metadata.row_group(group)
        return [facts.column(k) for k in range(facts.num_columns)]

    def check(self, group: int, names: Sequence[str]) -> int:
        """Return the rows of a row group, which may take some memory for its stored bytes.

        Raises SourceError if the metadata are implausible.
        """
        metadata = self._opened.metadata
        facts = metadata.row_group(group)
        columns = self._columns(group)
        widths = {
            each.path_in_schema: max(
                _WIDTHS.get(each.physical_type, 8), metadata.schema.column(k).length
            )
            for k, each in enumerate(columns)
        }
        columns = [each for each in columns if each.path_in_schema.split(".")[0] in names]
        declared = sum(
            max(each.num_values * widths[each.path_in_schema], each.total_uncompressed_size)
            for each in columns
        )
        if facts.num_rows < 0 or any(each.num_values < 0 for each in columns):
            raise SourceError(f"{self._file.name}: its metadata count fewer than no rows: refused")
        stored = sum(max(0, each.total_compressed_size) for each in columns)
        stored = min(stored, self._file.size)
        check_claim(declared, stored, f"{self._file.name}, row group {group},")
        self._check_repeats(group, columns, stored)
        return int(facts.num_rows)

    def _check_repeats(self, group: int, columns: Sequence[Any], stored: int) -> None:
        """Check the texts and bytes of a row group that are stored once and stand in many rows.

        They are measured as indices into their dictionary, which take no memory for their repeats.

        Raises SourceError if they become implausibly many bytes.
        """
        where = f"{self._file.name}, row group {group},"
        paths = [
            each.path_in_schema
            for each in columns
            if each.physical_type == "BYTE_ARRAY"
            and any("DICTIONARY" in encoding for encoding in each.encodings)
            and not is_plausible(each.num_values * each.total_uncompressed_size, stored)
        ]
        if not paths:
            return
        import pyarrow.parquet as pq

        with (
            parsing(where),
            self._file.for_library() as file,
            pq.ParquetFile(file, read_dictionary=paths) as opened,
        ):
            for path in paths:
                column = opened.read_row_group(group, columns=[path], use_threads=False).column(0)
                check_claim(sum(map(expanded_bytes, column.chunks)), stored, where)


class ParquetReader(RowGroupReader):
    """Read Parquet files. Samples are numbered in the order of files, row groups and rows.

    Columns of `struct<bytes, path>` or binary become images or bytes, depending on their content;
    strings become text, numbers and booleans scalars, lists of numbers arrays. A number that is
    missing is NaN.

    Args:
        path: a file, a folder, a pattern or a list, with the names of columns after `::`. In a
            folder of Hive's partitions, such as `country=DE`, their names are columns as well.
        label: the column that is the label, whatever its name; the field is called `label`.
        columns: columns of numbers to read as one float32 array, `features`, next to the label;
            "*" for all that are numbers.

    Raises SourceError for damaged files, nulls, and column types that samples cannot have.
    """

    format = "parquet"
    path_rules = PathRules(owns=lambda name: name.endswith(_SUFFIXES))

    def __init__(
        self,
        path: str | Sequence[str],
        label: str | None = None,
        columns: Sequence[str] | str | None = None,
    ) -> None:
        paths = split_paths(path)[0]
        files = [
            file
            for each in expand(paths)
            for file in files_of_partitions(each, _SUFFIXES) or files_below(each, _SUFFIXES)
        ]
        partitions = Partitions(path, files)
        self._setup(
            path,
            files,
            lambda file: partitions.opened(file, ParquetGroups(file)),
            sorted(partitions.columns),
            partitions.folders,
            label,
            columns,
        )

    @staticmethod
    def recognises(path: str) -> str | None:
        url = split_paths(expand(path)[0])[0][0]
        if lie_at(path, _SUFFIXES) or files_of_partitions(url, _SUFFIXES, 1):
            return None
        return "is neither a .parquet nor a folder of them"
