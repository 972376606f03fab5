"""Formats that dlio does not read, known by their names, with the way to one that it reads."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dlio.data.source import Source
from dlio.errors import SourceError

_PICKLE: Final = (
    "a pickle, which may run any code, so that dlio reads none: load it where you trust it, and "
    "write its arrays by numpy.savez (of CIFAR, torchvision.datasets.CIFAR10 has data and targets)"
)
_TENSORS: Final = (
    "a pickle of PyTorch, which may run code, so that dlio reads none: torch.load(..., "
    "weights_only=True), and write its tensors by numpy.savez"
)
_FORMATS: Final[Mapping[str, str]] = {
    r"\.beton": "of FFCV: run dlio pack on the data set that it was written from",
    r"\.orc": "ORC: pyarrow.orc.read_table reads it, and pyarrow.parquet.write_table writes it",
    r"\.avro": "Avro: polars.read_avro(...).write_parquet(...) converts it",
    r"\.lance": "of Lance: lance.dataset(...).to_table() reads it, and "
    "pyarrow.parquet.write_table writes it",
    r"\.rec": "RecordIO of MXNet: mxnet.recordio reads its records, to write into a tar of "
    "WebDataset (webdataset.TarWriter)",
    r"\.(pt|pth)": _TENSORS,
    r"\.(pkl|pickle|joblib)|data_batch_\d|test_batch|batches\.meta": _PICKLE,
    r"(data|test)_batch(_\d)?\.bin": "CIFAR's binary records: numpy.fromfile(..., 'uint8')"
    ".reshape(-1, 3073) has a label and the channels of a picture in each row, to write by "
    "numpy.savez",
    r"\.(jsonl|ndjson)(\.(gz|zst|bz2|xz))?": "JSON Lines: pandas.read_json(..., lines=True)"
    ".to_parquet(...) converts them",
    r"\.arff": "ARFF of Weka: scipy.io.arff.loadarff(...)[0] has its rows, and pandas."
    "DataFrame(rows).to_parquet(...) converts them (texts are bytes there: decode them)",
    r"\.(libsvm|svm|svmlight)": "of libsvm: sklearn.datasets.load_svmlight_file(...) reads "
    "features and labels, and numpy.savez(..., x=features.toarray(), y=labels) converts them",
    r"\.mdb": "LMDB: the module lmdb reads its values, to write into a tar of WebDataset "
    "(webdataset.TarWriter)",
    r"\.(db|sqlite|sqlite3)": "SQLite: pandas.read_sql(...).to_parquet(...) converts a table",
    r"\.(xlsx|xls|ods)": "a table of a spreadsheet: pandas.read_excel(...).to_csv(...) converts it",
    r"\.(mgz|mgh|mnc)": "a scan: nibabel.load(...) reads it, and nibabel.save(nibabel."
    "Nifti1Image(scan.get_fdata(), scan.affine), 'scan.nii.gz') converts it",
    r"\.(img|hdr)": "a part of a scan in two files (.hdr and .img), if it is a scan: nibabel.load("
    "...) reads it, and nibabel.save(nibabel.Nifti1Image(scan.get_fdata(), scan.affine), "
    "'scan.nii.gz') converts it",
    r"\.(nrrd|nhdr|mha|mhd)": "a scan: SimpleITK.ReadImage(...) reads it, and SimpleITK.WriteImage("
    "..., 'scan.nii.gz') converts it",
    r"\.safetensors": "of safetensors: safetensors.numpy.load_file(...) reads it, and numpy.savez "
    "writes its arrays",
    r"\.(h5ad|loom)": "AnnData: anndata.read_h5ad(...) reads it; its X and labels by numpy.savez",
    r"\.(wav|mp3|flac|ogg|m4a|opus)": "sound, which dlio does not decode: store samples or "
    "spectrograms as .npy in the same folders",
    r"\.(mp4|avi|mov|mkv|webm|m4v|mpg|mpeg)": "a film, which dlio does not decode: store its "
    "frames as pictures, or as .npy in the same folders",
    r"\.(data|conll|conllu)": "a table or text of no format of its own: write a table as "
    "x.csv with a line of names on top, by pandas.read_csv(..., header=None).to_csv(...)",
    r"\.(off|ply|pcd|las|laz|obj|stl)": "a point cloud or mesh, which dlio does not decode: store "
    "points as .npy in the same folders (trimesh.load(...) and open3d read them)",
    r"\.ts": "of sktime or a film: aeon.datasets.load_from_ts_file(...) has series and labels, to "
    "write by numpy.savez",
    r"\.(edf|bdf|gdf|fif)": "a recording: mne.io.read_raw(...) reads it, and numpy.savez writes "
    "its windows and labels",
    r"\.au": "sound, which dlio does not decode: store samples or spectrograms as .npy in the same "
    "folders",
    r"\.(gif|jfif|jpe|avif|heic|heif|jxl|jp2|j2k|tga|ico|psd|cr2|nef|arw|dng)": "a picture of a "
    "kind that is left out, as by torchvision's ImageFolder: convert it to .png or .jpg (PIL.Image."
    "open(...).convert('RGB').save(...); HEIC needs pillow-heif, raw photos rawpy)",
    r"\.(sqsh|sqfs|squashfs)": "an image of a file system: mount it (squashfuse FILE FOLDER), and "
    "open the folder",
    r"\.(7z|rar)": "an archive that is not read in place: extract it",
}
_KNOWN: Final = [
    (re.compile(rf"(?:{name})", re.IGNORECASE), words) for name, words in _FORMATS.items()
]
_BARE: Final = ("train", "test", "meta")
"""Files of CIFAR-100."""
_PROTOCOLS: Final = (b"\2", b"\3", b"\4", b"\5")
"""Second bytes of pickles."""
_PICTURES: Final = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp")
_LANCE: Final = "_versions"
_INDEXES: Final = {
    "index.json": (
        b'"chunk_bytes"',
        "litdata: litdata.StreamingDataset(...) reads it, to write by numpy.savez or into a tar of "
        "WebDataset (webdataset.TarWriter)",
    ),
    "dataset_meta.json": (
        b'"tensors"',
        "Deep Lake: deeplake.load(...).pytorch() reads it, to write by numpy.savez or into a tar "
        "of WebDataset (webdataset.TarWriter)",
    ),
}
"""Indexes of formats: what stands in them, and the words about each."""
_INDEX_HEAD: Final = 1 << 16
_LOOKED_INTO: Final = 8
_MOST_FILES: Final = 16


def words_of(name: str) -> str:
    """Return the words about the format of a file by its name, and how to convert it; "" if
    nothing is."""
    bare = name.rpartition("/")[2]
    for pattern, words in _KNOWN:
        match = next((m for m in pattern.finditer(bare) if m.end() == len(bare)), None)
        if match is not None and (match[0][0] in ".-" or match.start() == 0):
            return words
    return ""


def check_folder(url: str) -> None:
    """Raise SourceError if a folder without samples, or one right below, has a file of a format
    that is known and not read, or is a data set as Hugging Face's Hub keeps it in its cache."""
    source = Source(url)
    rows = source.names()
    check_index(source)
    if ("metadata", True) in rows and any(
        name.endswith(".metadata.json") for name, _ in source.names("metadata")
    ):
        raise SourceError(
            f"{source.shown()} is a table of Iceberg, whose metadata say which files are of its "
            "last version: write that one by pyiceberg (table.scan().to_arrow()) and "
            "pyarrow.parquet.write_table, or open 'data/*.parquet' for the rows of all versions"
        )
    if ("snapshots", True) in rows and (("blobs", True) in rows or ("refs", True) in rows):
        _refuse_hub_cache(source)
    places = ["", *(name for name, folder in rows if folder)][: _LOOKED_INTO + 1]
    for place in places:
        inner = source.names(place) if place else rows
        if (_LANCE, True) in inner:
            raise SourceError(f"{source.shown(place)} is a data set {words_of('.lance')}")
        for name, folder in inner:
            words = "" if folder else words_of(name) or _pickled(source, place, name)
            if words:
                shown = source.shown(f"{place}/{name}" if place else name)
                raise SourceError(f"{shown} is {_article(words)}")


def check_index(source: Source) -> None:
    """Raise SourceError for a folder with an index of a format that is known and not read."""
    for name, (mark, words) in _INDEXES.items():
        if (name, False) in source.names() and mark in source.read(name, 0, _INDEX_HEAD):
            raise SourceError(f"{source.path()} is a data set of {words}")


def _pickled(source: Source, place: str, name: str) -> str:
    """Return the words about a pickle without a suffix, such as those of CIFAR-100."""
    if name not in _BARE:
        return ""
    head = source.read(f"{place}/{name}" if place else name, 0, 2)
    return _PICKLE if head[:1] == b"\x80" and head[1:] in _PROTOCOLS else ""


def _refuse_hub_cache(source: Source) -> None:
    """Raise SourceError with the snapshot to open in place of its cache."""
    kept = sorted(name for name, folder in source.names("snapshots") if folder)
    is_known = ("refs", True) in source.names() and ("main", False) in source.names("refs")
    newest = source.read("refs/main", 0, 256).decode("ascii", "replace").strip() if is_known else ""
    chosen = newest if newest in kept else next(reversed(kept), None)
    if chosen is not None:
        raise SourceError(
            f"{source.shown()} is a cache of Hugging Face's Hub: open "
            f"{source.shown(f'snapshots/{chosen}')}, whose files are links to follow "
            "(--follow-links; in Python, follow_links=True)"
        )


def error_of_file(name: str) -> SourceError | None:
    """Return the error for a file of a format that is known and not read, for a zip archive, or for
    a lone picture; None for others."""
    words = words_of(name)
    if not words and name.lower().endswith(".zip"):
        words = f"a zip archive: open zip://::{name}, or extract it"
    elif not words and name.lower().endswith(_PICTURES):
        words = "a picture and no data set: open its folder"
    elif not words and name.endswith("dataset.json"):
        words = "a list of samples, as nnU-Net and MONAI have them: open its folder"
    elif not words and name.lower().endswith(".json"):
        words = "JSON, and none of COCO: pandas.read_json(...).to_parquet(...) converts a table"
    elif not words and name.lower().endswith(".txt"):
        words = "text: write its samples to a column of a CSV or Parquet file"
    return SourceError(f"{name} is {_article(words)}") if words else None


def _article(words: str) -> str:
    if words.startswith(("a ", "an ")):
        return words
    return f"a file {words}" if words.startswith("of ") else f"a file of {words}"


def pattern_for(source: Source, folders: Sequence[str], reads: Callable[[str], bool]) -> str:
    """Return a pattern below a folder, such as `*/anat/*_T1w.nii.gz`, for the first file in the
    first of some data sets `folders` that a reader `reads` by itself, and those like it in the
    others; "" if there are none.
    """
    first = folders[0]
    stack, looked = [first], 0
    while stack and looked < _MOST_FILES:
        here = stack.pop()
        rows = sorted(source.names(here))
        for name, folder in rows:
            looked += not folder
            if not folder and looked <= _MOST_FILES and reads(f"{here}/{name}"):
                # The part after the name of the outer folder, or the suffix.
                end = name.partition(first)[2] or name[_suffix_at(name) :]
                place = here.removeprefix(first)
                twins = (f"{each}{place}" for each in folders[1:])
                return f"*{place}/*{end}" if any(_has(source, each, end) for each in twins) else ""
        stack += [f"{here}/{name}" for name, folder in reversed(rows) if folder]
    return ""


def _has(source: Source, folder: str, end: str) -> bool:
    """True if a folder is there, and has a file whose name ends so."""
    try:
        return any(not inner and name.endswith(end) for name, inner in source.names(folder))
    except SourceError:
        return False


def _suffix_at(name: str) -> int:
    stem = name.removesuffix(".gz")
    return len(os.path.splitext(stem)[0])


_OF_HIVE: Final = {
    form: "write all rows to one file by pyarrow.parquet.write_table(pyarrow.dataset.dataset("
    f"FOLDER, format={kind!r}, partitioning='hive').to_table(), 'all.parquet')"
    for form, kind in (("tables", "csv"), ("arrow", "ipc"))
}
"""Remedies by format."""
_HIVE: Final = re.compile(r"([^=/]+)=[^/]*")
"""A folder of Hive's partitions, such as `country=DE`, and the column that it names."""


def hive_words(folders: Sequence[str], form: str) -> str:
    """Return the words about folders of data sets in a format that are partitions, "" if they are
    not all: the column in their names is in no file."""
    matches = [match for name in folders if (match := _HIVE.fullmatch(name))]
    if not folders or len(matches) < len(folders):
        return ""
    return (
        f"its folders are partitions of Hive, whose column {matches[0][1]} stands in their names "
        f"alone, which dlio reads of Parquet: {_OF_HIVE.get(form, 'write it into the files')}"
    )
