"""A rank other than 0 sees the file system as the script would have left it alone."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dlio.integrations.script.file_journal import NAME, JournalReader, JournalWriter
from dlio.integrations.script.file_view import FileView

NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
MORE = os.O_WRONLY | os.O_CREAT | os.O_APPEND
ALONE = os.O_WRONLY | os.O_CREAT | os.O_EXCL


class Ranks:
    """Rank 0, which changes the real file system, and the view of another rank."""

    def __init__(self, folder: Path, knows: bool = True) -> None:
        self.real = folder / "real"
        own, journal = folder / "own", folder / "journal"
        for each in (self.real, own / "files", journal):
            each.mkdir(parents=True)
        self._writer = JournalWriter(str(journal))
        reader = JournalReader(str(journal / NAME)) if knows else None
        self.view = FileView(lambda: str(own / "files"), reader)

    def at(self, name: str) -> str:
        return str(self.real / name)

    def rank_0(self, name: str, act: Callable[[Path], object]) -> None:
        """Have rank 0 note a path and change it."""
        self._writer.note(self.at(name))
        act(self.real / name)

    def write(self, name: str, text: str, flags: int = NEW) -> None:
        place = self.view.to_write(self.at(name), flags)
        with open(os.open(place, flags, 0o600), "w") as file:
            file.write(text)

    def read(self, name: str) -> str:
        return Path(str(self.view.existing(self.at(name)).place)).read_text()

    def is_there(self, name: str) -> bool:
        return self.view.find(self.at(name)).place is not None

    def names(self, name: str = ".") -> list[str]:
        return sorted(self.view.names(os.path.normpath(self.at(name))))


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


def test_what_a_rank_writes_is_there_for_it_alone(ranks: Ranks) -> None:
    (ranks.real / "log").write_text("old\n")
    ranks.write("log", "new\n", MORE)
    ranks.view.make_folder(ranks.at("out"))
    ranks.write("out/a", "1")
    assert ranks.read("log") == "old\nnew\n"
    assert (ranks.read("out/a"), ranks.names("out"), ranks.names()) == ("1", ["a"], ["log", "out"])
    assert os.listdir(ranks.real) == ["log"]
    assert (ranks.real / "log").read_text() == "old\n"


def test_what_rank_0_has_made_already_is_not_there_yet(ranks: Ranks) -> None:
    ranks.rank_0("run0", lambda path: path.mkdir())
    ranks.rank_0("run0/a", lambda path: path.write_text("0"))
    assert not ranks.is_there("run0")
    assert not ranks.is_there("run0/a")
    assert ranks.names() == []
    ranks.view.make_folder(ranks.at("run0"))
    assert ranks.names("run0") == []
    with pytest.raises(FileExistsError):
        ranks.view.make_folder(ranks.at("run0"))
    ranks.rank_0("run1", lambda path: path.mkdir())
    ranks.rank_0("run1/a", lambda path: path.write_text("0"))
    with pytest.raises(FileNotFoundError, match="rank 0 has written it"):
        ranks.view.existing(ranks.at("run1/a"))


def test_small_files_are_read_as_they_were(ranks: Ranks) -> None:
    (ranks.real / "count").write_text("7")
    ranks.rank_0("count", lambda path: path.write_text("8"))
    assert ranks.read("count") == "7"
    ranks.rank_0("count", lambda path: path.unlink())
    assert ranks.is_there("count")
    ranks.view.remove(ranks.at("count"))
    assert not ranks.is_there("count")


def test_a_link_that_rank_0_has_removed_is_read_as_its_file(ranks: Ranks) -> None:
    (ranks.real / "file").write_text("old")
    (ranks.real / "link").symlink_to("file")
    ranks.rank_0("link", os.remove)
    assert ranks.read("link") == "old"


def test_after_two_meetings_what_rank_0_alone_has_made_is_there(ranks: Ranks) -> None:
    ranks.rank_0("vocab", lambda path: path.write_text("a b"))
    ranks.view.settle()
    assert not ranks.is_there("vocab")  # Rank 0 may have made it after this meeting.
    ranks.view.settle()
    assert ranks.read("vocab") == "a b"


def test_a_folder_that_rank_0_has_emptied_is_removed_and_made_again(ranks: Ranks) -> None:
    (ranks.real / "out").mkdir()
    (ranks.real / "out" / "old").write_text("x")
    ranks.rank_0("out/old", lambda path: path.unlink())
    ranks.rank_0("out", lambda path: path.rmdir())
    ranks.rank_0("out", lambda path: path.mkdir())
    ranks.rank_0("out/new", lambda path: path.write_text("y"))
    assert ranks.names("out") == ["old"]
    with pytest.raises(OSError, match="not empty"):
        ranks.view.remove_folder(ranks.at("out"))
    ranks.view.remove(ranks.at("out/old"))
    ranks.view.remove_folder(ranks.at("out"))
    ranks.view.make_folder(ranks.at("out"))
    assert ranks.names("out") == []


def test_a_checkpoint_that_rank_0_saves_for_all_is_renamed_linked_and_removed(ranks: Ranks) -> None:
    for epoch in range(3):
        ranks.rank_0("tmp", lambda path, text=str(epoch): path.write_text(text))  # type: ignore[misc]
        ranks.view.adopt(ranks.at("tmp"), ranks.at("tmp"))
        ranks.view.settle()
        ranks.view.rename(ranks.at("tmp"), ranks.at("last"))
        assert ranks.read("last") == str(epoch)  # Rank 0 has not renamed it yet.
        ranks.rank_0("last", lambda path: (ranks.real / "tmp").rename(path))
        assert ranks.read("last") == str(epoch)
        if epoch:
            ranks.view.remove(ranks.at("best"))
        ranks.view.copy_name(ranks.at("last"), ranks.at("best"))
        assert ranks.read("best") == str(epoch)
        assert ranks.names() == ["best", "last"]


def test_a_name_with_rank_0s_time_in_it_stands_for_its_file(ranks: Ranks) -> None:
    ranks.view.make_folder(ranks.at("run-10:01"))
    ranks.rank_0("run-10:00", lambda path: path.mkdir())
    ranks.rank_0("run-10:00/a.pt", lambda path: path.write_text("weights"))
    ranks.view.adopt(ranks.at("run-10:01/a.pt"), ranks.at("run-10:00/a.pt"))
    assert ranks.read("run-10:01/a.pt") == "weights"
    assert ranks.names("run-10:01") == ["a.pt"]


def test_folders_are_renamed_with_what_the_rank_has_in_them(ranks: Ranks) -> None:
    (ranks.real / "old").mkdir()
    (ranks.real / "old" / "before").write_text("b")
    ranks.write("old/own", "o")
    ranks.view.rename(ranks.at("old"), ranks.at("new"))
    assert not ranks.is_there("old")
    assert (ranks.read("new/before"), ranks.read("new/own")) == ("b", "o")
    ranks.view.make_folder(ranks.at("x"))
    ranks.write("x/y", "z")
    ranks.view.rename(ranks.at("x"), ranks.at("w"))
    assert (ranks.read("w/y"), ranks.names("w")) == ("z", ["y"])


def test_own_links_lead_to_what_the_rank_sees(ranks: Ranks) -> None:
    ranks.view.make_folder(ranks.at("step-1"))
    ranks.view.make_link("step-1", ranks.at("latest"))
    ranks.write("latest/a", "1")
    assert ranks.read("step-1/a") == ranks.read("latest/a") == "1"


def test_errors_are_those_of_one_process(ranks: Ranks) -> None:
    (ranks.real / "file").write_text("")
    with pytest.raises(FileExistsError):
        ranks.view.to_write(ranks.at("file"), ALONE)
    with pytest.raises(FileNotFoundError):
        ranks.view.to_write(ranks.at("nowhere/a"), NEW)
    with pytest.raises(FileNotFoundError):
        ranks.view.rename(ranks.at("missing"), ranks.at("b"))
    with pytest.raises(NotADirectoryError):
        ranks.view.to_write(ranks.at("file/a"), NEW)
    with pytest.raises(FileNotFoundError):
        ranks.view.remove(ranks.at("missing"))


def test_without_the_journal_nothing_that_rank_0_did_first_is_an_error(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, knows=False)
    (ranks.real / "run0").mkdir()
    ranks.view.make_folder(ranks.at("run0"))
    ranks.view.remove(ranks.at("removed-before"))
    ranks.view.rename(ranks.at("renamed-before"), ranks.at("b"))
    ranks.write("run0/a", "1", ALONE)
    assert ranks.read("run0/a") == "1"


def test_a_rank_that_becomes_the_first_makes_its_folders_real(ranks: Ranks) -> None:
    ranks.view.make_folder(ranks.at("run"))
    ranks.write("run/log", "1\n")
    ranks.view.publish()
    assert (ranks.real / "run" / "log").read_text() == "1\n"
