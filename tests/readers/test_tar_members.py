"""Each sample of a tar is read, refused by name, or said to be left out."""

import io
import logging
import tarfile
from pathlib import Path

import lz4.frame
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlio.data.reader import Reader, open_reader
from dlio.errors import SourceError
from dlio_staging.pack_folder import pack

Member = tuple[str, bytes] | tuple[str, bytes, str]


def tar(path: Path, members: list[Member], form: int = tarfile.PAX_FORMAT) -> str:
    """Write members: (name, data), or (name, tar's type of a link, its target)."""
    with tarfile.open(path, "w", format=form) as archive:
        for member in members:
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1]) if len(member) == 2 else 0
            if len(member) == 3:
                info.type, info.linkname = member[1], member[2]
            archive.addfile(info, io.BytesIO(member[1]))
    return str(path)


def rows(reader: Reader, field: str) -> list[object]:
    payloads = reader.read(np.arange(len(reader)))
    values = [reader.schema.split(payload)[field] for payload in payloads]
    return [bytes(each) if isinstance(each, memoryview) else each for each in values]


def test_links_are_the_members_that_they_name(tmp_path: Path) -> None:
    members: list[Member] = [
        ("d/0.jpg", b"zero"),
        ("d/0.cls", b"0"),
        ("d/1.jpg", tarfile.LNKTYPE, "d/0.jpg"),
        ("d/1.cls", b"1"),
        ("d/2.jpg", tarfile.SYMTYPE, "../e/z.jpg"),
        ("d/2.cls", tarfile.SYMTYPE, "1.cls"),
        ("e/z.jpg", b"later"),
        ("e/z.cls", b"3"),
        ("e/folder.d", tarfile.SYMTYPE, "../d"),
    ]
    reader = open_reader(tar(tmp_path / "a.tar", members))
    assert rows(reader, "jpg") == [b"zero", b"zero", b"later", b"later"]
    assert np.asarray(reader.labels).tolist() == [0, 1, 1, 3]


@pytest.mark.parametrize("target", ["/etc/passwd", "../../x", "none.jpg", "1.jpg"])
def test_a_link_to_what_the_tar_lacks_is_named(target: str, tmp_path: Path) -> None:
    path = tar(tmp_path / "a.tar", [("0.jpg", b"0"), ("1.jpg", tarfile.SYMTYPE, target)])
    with pytest.raises(SourceError, match=r"1\.jpg is a link to .*--dereference"):
        open_reader(path)


def test_pictures_of_several_formats_are_one_field(tmp_path: Path) -> None:
    for shard, others in enumerate((("png", "jpeg", "jpg"), ("webp",) * 3)):
        members: list[Member] = []
        for k, other in enumerate(("jpg" if not shard else "webp", *others)):
            members += [(f"{k}.{other}", other.encode()), (f"{k}.cls", b"%d" % k)]
        tar(tmp_path / f"{shard}.tar", members)
    reader = open_reader(str(tmp_path))
    assert dict(reader.schema.fields) == {"cls": "int64", "jpg": "image"}
    assert rows(reader, "jpg") == [b"jpg", b"png", b"jpeg", b"jpg"] + [b"webp"] * 4
    assert np.asarray(reader.labels).tolist() == [0, 1, 2, 3] * 2


def test_an_empty_label_is_an_error_that_names_its_sample(tmp_path: Path) -> None:
    members: list[Member] = []
    for k, label in enumerate((b"4", b"\n", b"5")):
        members += [(f"{k}.jpg", b"x"), (f"{k}.cls", label)]
    with pytest.raises(SourceError, match="sample '1': its cls is empty"):
        open_reader(tar(tmp_path / "a.tar", members))


def test_names_of_classes_may_differ_from_tar_to_tar(tmp_path: Path) -> None:
    for shard, names in enumerate((["dog", "cat"], ["ant", "dog"])):
        members: list[Member] = []
        for k, name in enumerate(names):
            members += [(f"{k}.jpg", b"x"), (f"{k}.cls", name.encode())]
        tar(tmp_path / f"{shard}.tar", members)
    reader = open_reader(str(tmp_path))
    assert list(reader.classes) == ["ant", "cat", "dog"]
    assert np.asarray(reader.labels).tolist() == rows(reader, "cls") == [2, 1, 0, 2]


def test_a_long_id_is_text(tmp_path: Path) -> None:
    names = [f"https://example.org/{'deep/' * 20}{k}.jpg" for k in range(2)]
    members: list[Member] = []
    for k, name in enumerate(names):
        members += [(f"{k}.jpg", b"x"), (f"{k}.id", name.encode())]
    reader = open_reader(tar(tmp_path / "a.tar", members))
    assert rows(reader, "id") == [name.encode() for name in names]


def test_what_few_samples_have_is_left_out_with_its_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members: list[Member] = [*((f"{k}.jpg", b"x") for k in range(6)), ("5.txt", b"t")]
    path = tar(tmp_path / "a.tar", members)
    for _ in range(2):  # Also when the index comes from the cache.
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dlio"):
            assert len(open_reader(path)) == 6
        assert [record.getMessage() for record in caplog.records] == [
            f"{path} has txt in 1 of its 6 samples, and not in the first: it is left out"
        ]
    members = [("0.jpg", b"x")]
    for k in range(1, 4):
        members += [(f"{k}.jpg", b"x"), (f"{k}.cls", b"1")]
    with pytest.raises(SourceError, match="sample '0' has no cls, which 3 others have"):
        open_reader(tar(tmp_path / "b.tar", members))


def test_a_packed_tar_has_the_same_samples_in_webdataset(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset").tariterators
    np.savez(tmp_path / "a.npz", x=np.arange(12.0).reshape(6, 2), label=np.arange(6))
    pack(open_reader(f"{tmp_path}/a.npz"), str(tmp_path / "b"), format="tar", order="source")
    path = next((tmp_path / "b").rglob("*.tar"))
    with open(path, "rb") as stream:  # WebDataset leaves its files open.
        opened = [{"url": str(path), "stream": stream}]
        read = list(wds.group_by_keys(wds.tar_file_expander(opened)))
    assert [int(row["cls"]) for row in read] == list(range(6))
    assert len(open_reader(str(path))) == 6


def test_a_tar_that_an_earlier_version_packed_keeps_its_kinds(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(12.0).reshape(6, 2), label=np.arange(6))
    pack(open_reader(f"{tmp_path}/a.npz"), str(tmp_path / "b"), format="tar", order="source")
    path, former = next((tmp_path / "b").rglob("*.tar")), tmp_path / "former.tar"
    with tarfile.open(path) as new, tarfile.open(former, "w") as old:
        for member in new:
            data = new.extractfile(member)
            member.name = member.name.replace("__dlio__/schema.json", "__dlio__.json")
            old.addfile(member, data)
    with tarfile.open(former) as old:
        assert "__dlio__.json" in old.getnames()
    assert len(open_reader(str(former))) == 6
    assert open_reader(str(former)).schema == open_reader(str(path)).schema


def test_two_members_of_a_name_are_refused_and_underscores_begin_names(tmp_path: Path) -> None:
    members: list[Member] = [("__meta__/0.txt", b""), ("__0.txt", b"a"), ("__0.bin", b"b")]
    reader = open_reader(tar(tmp_path / "a.tar", members))
    assert (reader.name(0), rows(reader, "txt")) == ("__0", [b"a"])
    with pytest.raises(SourceError, match="sample '__0' has two members that are 'txt'"):
        open_reader(tar(tmp_path / "b.tar", [*members, ("__0.TXT", b"c")]))


def test_a_link_is_to_the_member_before_it(tmp_path: Path) -> None:
    members: list[Member] = [
        ("0.txt", b"old"),
        ("1.txt", b"x"),
        ("0.txt", tarfile.LNKTYPE, "0.txt"),
    ]
    members += [("2.txt", tarfile.LNKTYPE, "0.txt")]
    assert rows(open_reader(tar(tmp_path / "a.tar", members)), "txt") == [
        b"old",
        b"x",
        b"old",
        b"old",
    ]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), folder=st.sampled_from(["", "d/", "d/e/"]), count=st.integers(1, 6))
def test_members_that_lie_apart_are_joined_by_name(
    data: st.DataObject, folder: str, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fields = data.draw(st.sampled_from([("jpg", "cls"), ("cls", "jpg", "txt"), ("npy", "cls")]))
    array = io.BytesIO()
    np.save(array, np.arange(3))
    texts = {"jpg": b"p%d", "cls": b"%d", "txt": b"t%d"}
    order = data.draw(st.permutations([(k, field) for k in range(count) for field in fields]))
    members: list[Member] = [
        (f"{folder}{k}.{field}", texts[field] % k if field in texts else array.getvalue())
        for k, field in order
    ]
    reader = open_reader(tar(tmp_path_factory.mktemp("tars") / "a.tar", members))
    names = list(dict.fromkeys(f"{folder}{k}" for k, _ in order))
    assert [reader.name(k) for k in range(len(reader))] == names
    numbers = [int(name.removeprefix(folder)) for name in names]
    assert np.asarray(reader.labels).tolist() == numbers
    for field in set(fields) & {"jpg", "txt"}:
        assert rows(reader, field) == [texts[field] % k for k in numbers]
        one = [reader.schema.split(reader.read(np.array([k]))[0])[field] for k in range(count)]
        assert one == rows(reader, field)


@pytest.mark.parametrize("above", ["", "train/"])
def test_folders_of_pictures_and_of_labels_are_joined_in_one_line(
    above: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pictures: list[Member] = [
        (f"{above}images/{k}.{'jpg' if k % 2 else 'png'}", b"p%d" % k) for k in range(4)
    ]
    labels: list[Member] = [(f"{above}labels/{k}.cls", b"%d" % (7 - k)) for k in reversed(range(4))]
    with caplog.at_level(logging.WARNING, "dlio"):
        reader = open_reader(tar(tmp_path / "a.tar", pictures + labels))
    assert rows(reader, "png") == [b"p0", b"p1", b"p2", b"p3"]
    assert np.asarray(reader.labels).tolist() == [7, 6, 5, 4]
    assert "members of its samples in folders of their own, and they are joined" in caplog.text
    with pytest.raises(SourceError, match=r"sample '(train/)?3' has no cls"):
        open_reader(tar(tmp_path / "b.tar", pictures + labels[1:]))
    # Folders that each hold both are samples of their own.
    mixed: list[Member] = [("a/0.jpg", b""), ("a/0.cls", b"1"), ("b/1.jpg", b""), ("c/1.cls", b"1")]
    with pytest.raises(SourceError, match="sample 'b/1' has no cls"):
        open_reader(tar(tmp_path / "c.tar", mixed))


def test_one_label_that_is_missing_is_named_where_members_lie_apart(tmp_path: Path) -> None:
    apart: list[Member] = [(f"{k}.jpg", b"") for k in range(3)]
    apart += [(f"{k}.cls", b"1") for k in range(2)]
    with pytest.raises(SourceError, match="sample '2' has no cls"):
        open_reader(tar(tmp_path / "a.tar", apart))


def test_sparse_members_have_a_remedy(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "b.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo("0.npy")
        info.type = tarfile.GNUTYPE_SPARSE
        archive.addfile(info)
    with pytest.raises(SourceError, match=r"0\.npy is stored as a sparse file"):
        open_reader(f"{tmp_path}/b.tar")


def test_a_tar_without_its_end_and_one_that_goes_on_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = Path(tar(tmp_path / "a.tar", [(f"{k}.txt", b"t") for k in range(3)])).read_bytes()
    for data, words in ((whole[:2048], "lacks its end mark"), (whole + whole, "goes on after")):
        path = tmp_path / f"{len(data)}.tar"
        path.write_bytes(data)
        with caplog.at_level(logging.WARNING, "dlio"):
            assert len(open_reader(str(path))) == data[:10240].count(b"ustar")
        assert words in caplog.text


@pytest.mark.parametrize("flushed", [False, True])
def test_all_frames_of_a_compressed_tar_are_read(flushed: bool, tmp_path: Path) -> None:
    members: list[Member] = [(f"{k}.txt", bytes([65 + k]) * 70000) for k in range(6)]
    plain = tar(tmp_path / "a.tar", members)
    data = Path(plain).read_bytes()
    if flushed:
        with lz4.frame.LZ4FrameCompressor(block_linked=False, auto_flush=True) as maker:
            packed = maker.begin() + b"".join(
                maker.compress(data[k : k + 3000]) for k in range(0, len(data), 3000)
            )
            packed += maker.flush()
    else:
        skipped = (0x184D2A51).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"any"
        parts = [data[:3072], data[3072:100000], b"", data[100000:]]
        packed = skipped.join(lz4.frame.compress(part, block_linked=False) for part in parts)
    (tmp_path / "b.tar.lz4").write_bytes(packed)
    assert rows(open_reader(f"{tmp_path}/b.tar.lz4"), "txt") == [each[1] for each in members]


PARTS = st.lists(
    st.tuples(
        st.sampled_from(["jpg", "png", "JPEG"]),
        st.integers(0, 99),
        st.sampled_from(["", "deep/" * 5, "wörd/", "long" * 40 + "/"]),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.nightly  # Imports webdataset, which leaves its files open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=PARTS, form=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
def test_tars_have_the_samples_that_webdataset_finds(
    parts: list[tuple[str, int, str]], form: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wds = pytest.importorskip("webdataset")
    members: list[Member] = [("._0.jpg", b"macOS")]
    for k, (extension, label, folder) in enumerate(parts):
        key = f"{folder}{k:03d}"
        members += [(f"{key}.{extension}", b"%d" % k), (f"{key}.cls", b"%d" % label)]
    path = tar(tmp_path_factory.mktemp("tars") / "a.tar", members, form)
    data = wds.WebDataset(path, shardshuffle=False, empty_check=False).to_tuple(
        "__key__", "jpg;png;jpeg", "cls"
    )
    expected = [(key, image, int(label)) for key, image, label in data]
    reader = open_reader(path)
    field = next(name for name, kind in reader.schema.fields if kind != "int64")
    names = [reader.name(k) for k in range(len(reader))]
    labels = np.asarray(reader.labels).tolist()
    assert list(zip(names, rows(reader, field), labels, strict=True)) == expected


def test_names_that_come_again_in_a_tar_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members: list[Member] = [
        (f"{k}.{field}", b"%d" % number)
        for number, k in enumerate([0, 1, 0, 1, 2])
        for field in ("jpg", "cls")
    ]
    reader = open_reader(tar(tmp_path / "a.tar", members))
    assert reader.labels.tolist() == list(range(5))  # As the package webdataset has them.
    assert "several samples called '0', and 2 of 5 names were there before" in caplog.text
    caplog.clear()
    for k in range(2):  # The names of another tar are its own.
        tar(tmp_path / f"s{k}.tar", members[4:])
    assert len(open_reader(str(tmp_path / "s{0..1}.tar"))) == 6
    assert not caplog.text
