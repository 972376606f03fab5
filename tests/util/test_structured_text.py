"""JSON, YAML and tables are bounded before they become objects; streams take linear work."""

import bz2
import gzip
import lzma
from collections.abc import Callable

import pytest

from dlio.errors import SourceError
from dlio.util import limits
from dlio.util.decompression_limits import reading, streamed
from dlio.util.structured_text import check_cells, parse_json, parse_yaml

LARGE = 10 << 20


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "usable_memory", lambda: 256 << 20)


@pytest.mark.parametrize("part", ["[],", "{},", '{"":0},', '"",', "[[]],"])
def test_json_that_becomes_far_larger_than_it_is_is_refused_unparsed(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"[{part * (LARGE // len(part))}0]".encode()
    monkeypatch.setattr("json.loads", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(SourceError, match=r"^a\.json would need .*--trust"):
        parse_json(text, "a.json")


@pytest.mark.parametrize("part", ["123.45, ", '{"id": 123456, "bbox": [1.25, 2.5, 12.75, 3.5]}, '])
def test_sound_json_is_read_whatever_its_size(part: str) -> None:
    count = LARGE // len(part)
    assert len(parse_json(f"[{part * count}0]".encode(), "a.json")) == count + 1


def test_json_that_is_trusted_is_read() -> None:
    with limits.trusting(True):
        assert len(parse_json(b"[" + b"[]," * (4 << 20) + b"0]", "a.json")) == (4 << 20) + 1


@pytest.mark.parametrize("kind", ["[", '{"a":'])
def test_json_of_any_depth_is_an_ordinary_error(kind: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json((kind * 100_000).encode(), "a.json")


def test_a_table_of_very_many_cells_is_refused_before_it_is_split() -> None:
    with pytest.raises(SourceError, match=r"^a\.csv would need"):
        check_cells(b",\n" * (4 << 20), b",\n", "a.csv")
    check_cells(b"pictures/000001.jpg,tabby cat\n" * (1 << 18), b",\n", "a.csv")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &x [1]\nb: *x\n", "anchors and aliases"),
        ("a: &x 1\n", "anchors and aliases"),
        ("<<: {a: 1}\n", "merge keys"),
        ("a: !!python/name:os.system\n", "the tag"),
        ("a: " + "[" * 1000, "nested too deeply"),
        ("a: [" + "b," * 300_000 + "]", "values"),
        ("a: 1\n---\nb: 1\n", "several documents"),
        ("? [a]\n: b\n", "a key is not a name"),
        ("a: [", "is not YAML"),
    ],
)
def test_yaml_of_which_few_bytes_stand_for_many_is_refused_in_one_line(
    text: str, says: str
) -> None:
    with pytest.raises(SourceError, match=says) as caught:
        parse_yaml(text.encode(), "data.yaml", 1 << 20)
    assert len(str(caught.value).splitlines()) == 1


def test_yaml_is_texts_as_they_are_written() -> None:
    text = b"names: [no, 1.0, '<<', null]\nn: {0: a, 'b': }\nk: [17, 3]\n"
    assert parse_yaml(text, "data.yaml", 1 << 20) == {
        "names": ["no", "1.0", "<<", "null"],
        "n": {"0": "a", "b": ""},
        "k": ["17", "3"],
    }
    assert parse_yaml(b"# nothing\n", "data.yaml", 1 << 20) is None


@pytest.mark.parametrize(
    ("codec", "pack"),
    [("gzip", gzip.compress), ("bz2", bz2.compress), ("lzma", lzma.compress)],
)
def test_many_small_streams_take_work_that_grows_with_their_bytes(
    codec: str, pack: Callable[[bytes], bytes]
) -> None:
    data = pack(b"large" * 100_000) + pack(b"abc") * 300 + bytes(5000) + pack(b"end")
    given = 0

    def read(at: int, count: int) -> memoryview:
        nonlocal given
        part = reading(data)(at, count)
        given += len(part)
        return part

    assert b"".join(streamed(codec, read)) == b"large" * 100_000 + b"abc" * 300 + b"end"
    # A decompressor copies what it is given and does not need: some hundred bytes for a stream.
    assert given <= 3 * len(data) + 303 * 2048


def test_streams_that_are_cut_off_are_told_and_what_follows_them_is_left() -> None:
    data = gzip.compress(b"a" * 5000)
    with pytest.raises(EOFError):
        list(streamed("gzip", reading(data[:-9])))
    assert b"".join(streamed("gzip", reading(data + b"tail"))) == b"a" * 5000
