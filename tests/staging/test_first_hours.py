"""Commands that list and check: status, verify, cache."""

import ast
import os
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

import dlio
from dlio.cli.cache_command import CacheCleanOptions, CacheListOptions, clean, list_entries
from dlio.cli.ls import ListOptions
from dlio.cli.ls import command as ls
from dlio.data.index import open_cache
from dlio.errors import SourceError, UsageError
from dlio.storage.inventory import known_roots, remember_root
from dlio.util import printable
from dlio.util.folders import open_private
from dlio.util.shared_folders import user_folder
from dlio_staging.manage import StatusOptions, describe_status, find_roots, status
from dlio_staging.pack_folder import pack
from dlio_staging.pack_plan import PackOptions
from dlio_staging.stage import stage
from dlio_staging.stage_plan import StageOptions
from dlio_staging.verify import VerifyOptions
from dlio_staging.verify import command as verify

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DLIO_TIERS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        for k in range(3):
            pixels = np.full((20, 20, 3), 40 * k, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{k}.png")
    return tmp_path / "data"


def _tier(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir(mode=0o700)
    return tmp_path / name


def test_status_finds_what_was_staged(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = _tier(tmp_path, "some place")
    stage(str(pictures), StageOptions(tiers=f"{tier}:64MB"))
    status(StatusOptions())
    shown = capsys.readouterr().out
    assert str(tier) in shown
    assert str(pictures) in shown


def test_tiers_of_training_are_found_too(pictures: Path, tmp_path: Path) -> None:
    tier = _tier(tmp_path, "tier")
    with (
        dlio.open(pictures, image_size=16, tiers=[(tier, "64MB")]) as data,
        dlio.DataLoader(data, batch_size=2) as loader,
    ):
        list(loader)
    assert known_roots() == [str(tier)]


def test_a_root_that_holds_nothing_of_this_user_is_not_shown(tmp_path: Path, cache: Path) -> None:
    for name in ("gone", "stranger"):
        remember_root(str(tmp_path / name))
    (tmp_path / "stranger" / f"dlio-{os.getuid()}").mkdir(parents=True, mode=0o777)
    (tmp_path / "stranger" / f"dlio-{os.getuid()}").chmod(0o777)
    tiers = describe_status(None)["tiers"]
    assert isinstance(tiers, list)
    assert not [each for each in tiers if str(tmp_path) in each["root"]]
    with open_cache():
        for text in ("nonsense", '{"root": 5}', '["x"]', '{"root": "relative"}', "[" * 9000):
            (cache / "tier-0123456789abcdef.json").write_text(text)
            assert len(known_roots()) == 2


def test_the_list_of_another_user_is_not_believed(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember_root("/own")
    cache.chmod(0o777)  # Now anyone may have written what is in it.
    assert known_roots() == []
    remember_root("/later")
    cache.chmod(0o700)
    assert known_roots() == ["/own"]


def test_one_damaged_file_is_named_on_the_line(pictures: Path) -> None:
    (pictures / "a" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    with pytest.raises(dlio.CorruptBlock, match=r"1 sample refused \(.*1\.png.*\): repair, con"):
        verify(VerifyOptions(str(pictures)))
    (pictures / "b" / "2.png").write_bytes(b"\x89PNG\r\n\x1a\n damaged")
    with pytest.raises(
        dlio.CorruptBlock, match="2 samples refused: repair, convert or remove them"
    ):
        verify(VerifyOptions(str(pictures)))


def test_sound_files_that_are_refused_are_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, colour in (("images", (1, 2, 3)), ("masks", (9, 0, 0))):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8), colour).save(tmp_path / folder / "a.png")
    with pytest.raises(dlio.CorruptBlock, match=r"1 sample refused .*it is in colour") as error:
        verify(VerifyOptions(str(tmp_path)))
    shown = capsys.readouterr().out + str(error.value)
    assert "refused: mask of images/a.png cannot be used: it is in colour" in shown
    assert not any(word in shown for word in ("damaged", "restore", "corrupt"))


def test_names_are_escaped(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = pictures.with_name("evil\x1b[31m\nname")
    (pictures / "a").rename(pictures / "a\x1b]0;owned\x07")
    (pictures / "b" / "0.png").rename(pictures / "b" / "\x1b[2J.png")
    pictures.rename(evil)
    ls(ListOptions(str(evil)))
    (evil / "b" / "\x1b[2J.png").write_bytes(b"damaged")
    with pytest.raises(dlio.CorruptBlock) as error:
        verify(VerifyOptions(str(evil)))
    shown = capsys.readouterr().out + str(error.value)
    assert "\\x1b" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


@pytest.mark.parametrize(
    "module",
    [*(ROOT / "staging/dlio_staging").glob("*.py"), *(ROOT / "dlio/cli").glob("l[se]*.py")],
    ids=lambda path: path.name,
)
def test_all_lines_go_through_print_line(module: Path) -> None:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            call = ast.unparse(node)
            assert call.startswith("print(json_text("), f"{call}: use print_line, which escapes"


def test_the_cache_is_listed_and_cleaned(
    pictures: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(dlio.open(pictures)) == 6
    remember_root("/some/tier")
    (cache / "mine.txt").write_text("not dlio's")
    (cache / "my folder").mkdir()
    (cache / "my folder" / "file").write_text("not dlio's")
    list_entries(CacheListOptions())
    shown = capsys.readouterr().out
    assert "folder." in shown
    clean(CacheCleanOptions(older=1.0))
    assert "removed 0 indexes" in capsys.readouterr().out
    clean(CacheCleanOptions())
    assert "removed 1 index" in capsys.readouterr().out
    assert (cache / "my folder" / "file").exists()
    assert (cache / "mine.txt").exists()
    assert known_roots() == ["/some/tier"]
    assert len(dlio.open(pictures)) == 6


def test_old_indexes_are_chosen(pictures: Path, cache: Path) -> None:
    assert len(dlio.open(pictures)) == 6
    (index,) = (each for each in cache.iterdir() if each.is_dir())
    long_ago = time.time() - 3 * 86400
    os.utime(index, (long_ago, long_ago))
    clean(CacheCleanOptions(older=2.0))
    assert not index.exists()


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    (tmp_path / "tables").mkdir()
    for name, rows in (("train-00000", 4), ("train-00001", 2), ("test-00000", 2)):
        table = pa.table({"x": np.arange(rows, dtype=np.float32), "label": np.arange(rows) % 2})
        parquet.write_table(table, tmp_path / "tables" / f"{name}-of-00002.parquet")
    return tmp_path / "tables"


def test_a_split_is_packed_staged_and_verified(
    tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (PackOptions(), PackOptions(source_split="dev")):
        with pytest.raises(UsageError, match=r"(train|test).*(test|train).*choose"):
            pack(str(tables), str(tmp_path / "packed"), options=options)
    done = pack(str(tables), str(tmp_path / "packed"), options=PackOptions(source_split="test"))
    assert done.samples == 2
    assert len(dlio.open(str(tmp_path / "packed"), tiers="none")) == 2

    tier = _tier(tmp_path, "tier")
    with pytest.raises(UsageError, match="--split train"):
        stage(str(tables), StageOptions(tiers=f"{tier}:64MB"))
    staged = stage(str(tables), StageOptions(tiers=f"{tier}:64MB", split="train"))
    assert staged.samples == 6
    with dlio.open(str(tables), tiers=f"{tier}:64MB", split="train") as data:
        assert len(data) == 6

    verify(VerifyOptions(str(tables), split="test"))
    assert "2 samples" in capsys.readouterr().out
    (block,) = tier.rglob("*.blk")
    block.write_bytes(block.read_bytes()[:-9] + b"123456789")
    with pytest.raises(SourceError, match="give --source, and --split"):
        verify(VerifyOptions(str(tier), heal=True))
    verify(VerifyOptions(str(tier), heal=True, source=str(tables), split="train"))
    assert "1 block fetched again" in capsys.readouterr().out


def test_status_leaves_out_tiers_in_which_nothing_is(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier, empty = _tier(tmp_path, "tier"), _tier(tmp_path, "empty")
    stage(str(pictures), StageOptions(tiers=f"{tier}:64MB"))
    os.close(open_private(str(empty), user_folder(), marked=1))
    remember_root(str(empty))
    status(StatusOptions())
    shown = capsys.readouterr().out
    assert str(tier) in shown
    assert str(empty) not in shown
    status(StatusOptions(tiers=str(empty)))
    assert "nothing is staged here" in capsys.readouterr().out


def test_folders_of_tiers_may_be_mixed_with_sizes_and_have_to_be_there(tmp_path: Path) -> None:
    tier, other = _tier(tmp_path, "tier"), _tier(tmp_path, "other")
    assert find_roots(f"{tier},{other}:64MB") == [str(tier), str(other)]
    with pytest.raises(UsageError, match="gone: no such folder"):
        find_roots(f"{tier},{tmp_path}/gone")


def test_a_cache_that_cannot_be_written_is_told_once(
    pictures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(printable, "_told", set())
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        dlio.open(pictures, image_size=16, tiers="none").close()
    said = [each.message for each in caplog.records if "cannot be written" in each.message]
    assert len(said) == 1
    assert "name another folder in DLIO_CACHE" in said[0]
