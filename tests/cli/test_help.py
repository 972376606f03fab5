"""Help: headings, examples that can be run, `-h`, and `--follow-links` where data are named."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dlio.cli import main
from dlio.cli.app import all_commands, find_command, places
from dlio.cli.cli_command import Command, default_of
from dlio.cli.command_line import _MEANT
from dlio.cli.option_groups import examples_of, groups_of, usual_of
from dlio.errors import UsageError

Dlio = Callable[..., subprocess.CompletedProcess[str]]
COMMANDS = {command.name: command for command in all_commands()}
EXAMPLES = [line for command in COMMANDS.values() for line in examples_of(command.function)]


@pytest.fixture
def dlio(tmp_path: Path) -> Dlio:
    def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dlio.cli", *args],
            cwd=tmp_path,
            env={**os.environ, "DLIO_CACHE": str(tmp_path / "cache"), "COLUMNS": "80", **env},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    return run


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Return a data set with a picture that is a link out of its folder."""
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(tmp_path / "outside.png")
    for name in "ab":
        (tmp_path / "data" / name).mkdir(parents=True)
        for k in range(2):
            pixels = np.full((40, 40, 3), 90 * k, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{k}.png")
    (tmp_path / "data" / "a" / "link.png").symlink_to(tmp_path / "outside.png")
    return tmp_path / "data"


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_can_be_run(example: str) -> None:
    assert len(example) < 78
    words = shlex.split(example)
    tokens = words[words.index("dlio") + 1 :]
    command = find_command(tokens)
    assert command is not None
    own, _ = command.split(tokens[1:])
    flags = {field.flag for field in command.fields} | {"-n", "--"}
    for word in own:
        assert not word.startswith("-") or word in flags


def test_headings_hold_all_options_of_train() -> None:
    train = COMMANDS["train"]
    headings = [group.name for group in train.groups().values()]
    assert set(headings) == set(groups_of(train.function))
    assert set(train.groups()) == {field.name for field in train.fields}


@pytest.mark.parametrize("command", [*COMMANDS.values()], ids=lambda command: command.name)
def test_commands_that_read_data_show_follow_links(command: Command) -> None:
    shown = "follow_links" in command.callable().__annotations__
    first = command.name.split()[0]
    reading = {"train", "run", "ls", "pack", "stage", "verify"}
    assert shown == command.reads_data
    assert shown or first not in reading


@pytest.mark.parametrize("command", [(), ("train",), ("bench", "loader"), ("cache",)])
def test_h_is_help(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = []
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as ended:
            main([*command, flag])
        assert not ended.value.code
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "Usage: dlio" in shown[0]
    assert "ARGS" not in shown[0].splitlines()[0]
    assert all(len(line) <= 80 for line in shown[0].splitlines())


@pytest.mark.parametrize(
    "command",
    [
        ("ls", "data"),
        pytest.param(("verify", "data"), marks=pytest.mark.nightly),
        pytest.param(("pack", "data", "packed"), marks=pytest.mark.nightly),
        pytest.param(("stage", "data", "--tiers", "tier:64MB"), marks=pytest.mark.nightly),
        ("train", "data", "--epochs", "1", "--image-size", "32", "--tiers", "none"),
        pytest.param(
            ("train", "data", "-n", "2", "--epochs", "1", "--image-size", "32", "--tiers", "none"),
            marks=[pytest.mark.mpi, pytest.mark.nightly],
        ),
    ],
    ids=lambda command: " ".join(command[:4]),
)
def test_links_are_followed_if_asked_for(
    dlio: Dlio, linked: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    assert linked.is_dir()
    (tmp_path / "tier").mkdir(mode=0o700)
    refused = dlio(*command)
    assert refused.returncode == 2
    assert "--follow-links" in refused.stderr
    followed = dlio(*command, "--follow-links")
    assert followed.returncode == 0, followed.stderr


def _shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert not ended.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("command", sorted({"", *places(), *COMMANDS}))
def test_help_fits_a_screen_and_help_all_has_the_rest(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _shown(monkeypatch, capsys, *command.split(), "--help").rstrip().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r"\w-$", line)]  # Values stay in one piece.
    known = COMMANDS.get(command)
    usual = {} if known is None else usual_of(known.function)
    if known is None or not usual:
        assert "--help-all" not in "".join(lines)
        return
    count = len(known.shown_fields)
    assert lines[-1] == f"`dlio {known.name} --help-all` shows all {count} options"
    assert set(usual) <= {field.name for field in known.fields}
    whole = _shown(monkeypatch, capsys, *command.split(), "--help-all")
    for field in known.shown_fields:
        names = {field.flag, f"--[no-]{field.flag[2:]}"} | ({"-n,"} & {f"{field.option.short},"})
        rows = [line for line in lines if line[2:].split(" ")[0] in names]
        assert len(rows) == (field.name in usual), field.flag
        assert field.flag.lstrip("-") in whole


def test_a_brief_help_hides_options_and_still_takes_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _shown(monkeypatch, capsys, "train", "x", "--mixup", "0.2", "--print-config")
    assert "mixup: 0.2" in shown
    with pytest.raises(SystemExit) as ended:
        main(["train", "x", "--mixupp", "0.2"])
    assert ended.value.code == 2
    assert "did you mean --mixup" in capsys.readouterr().err


def test_commands_stand_by_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _shown(monkeypatch, capsys, "--help")
    places = [
        shown.index(f"\n{use}:\n") for use in ("Data", "Train", "Measure", "Cluster", "Other")
    ]
    assert places == sorted(places)
    for name, use in (("pack", 0), ("run", 1), ("bench", 2), ("launch", 3)):
        assert places[use] < shown.index(f"\n  {name} ") < places[use + 1]
    for other in ("bench", "cache", "ls"):
        assert _shown(monkeypatch, capsys, other, "--help-all") == _shown(
            monkeypatch, capsys, other, "--help"
        )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "eval data",
            r"--weights is missing: give FILE \(weights that `dlio train --save` h",
        ),
        ("eval data --weights", r"--weights: a value is missing: give FILE \(weights that"),
        ("eval data --weights data", "--weights data: this is a folder: give a file"),
        ("eval", "SRC is missing: data set to evaluate on"),
        ("pack data", "DST is missing: folder to write"),
        ("bench peers", "ACTION is missing: "),
        ("plan --samples 9 --model-time -5s", "--model-time -5s: write --model-time=-5s"),
        ("plan --samples 9 --model-time=-5s", "--model-time '-5s' is not a time"),
        ("plan --samples 9 --sample-size 10XB", "--sample-size '10XB' is not a size"),
        ("plan --samples 9 --model-time --nodes 2", "--model-time: a value is missing"),
        ("pack data out --quality 101", "--quality 101: give a number from 1 to 100"),
        ("run --check 0 train.py", "--check 0: give at least 1$"),
        ("cache clean --older 3x", r"--older 3x: give a number \(unit: days\)"),
        ("report", r"report: no such command; did you mean bench html \(a page of reports\) or b"),
        ("Validate data", r"did you mean verify \(data\) or doctor \(the machine\)\?"),
        ("ls my data", "my data: quote a name with spaces, as in 'my data' "),
        ("ls my other data", "other data: unexpected argument "),
        ("--json ls data", "--json: write options after the command: dlio ls ...$"),
        ("--jsn", r"--jsn: no such option \("),
        ("cache lst", "cache lst: no such command; did you mean ls"),
        ("bench nosuch", "bench nosuch: no such command; there are agreement, chaos"),
        ("doctor --nodes", r"--nodes: no such option \("),
        ("bench loader --peers torchh", "did you mean torch"),
        ("bench train --forecast 8..4", "--forecast 8..4: give the lower number first"),
        ("bench shuffle nowhere", "nowhere: no such folder"),
        ("ls data --max-size 1", "--max-size: no such option"),
        ("launch -n 2 -- no-such-program", "no-such-program: no such program on this machine"),
        ("train data --tiers ram:8Gigs", "tier ram:8Gigs: the size '8Gigs' is not a size"),
        ("train data --shuffle partial(2)", "partial\\(q\\), with q from 0 to 1$"),
        ("plan data --source-bandwidth 10", "--source-bandwidth '10' is not a size"),
        ("demo --image-size 0", "--image-size 0: give at least 32 pixels"),
        ("top --every 0", "--every 0.0: give seconds from 0.1 to 3,600"),
        ("ledger data data", "data cannot be read: Is a directory; give a file that"),
        ("search data --set lr=1e-4..1e-1:lg", "lr=1e-4..1e-1:lg: .*; did you mean log"),
        ("bench train --data nowhere", "nowhere: no such file or folder"),
        ("bench chaos data --keep words.txt", "--keep .*words.txt cannot be written: "),
        (
            "bench exchange data --val data --case placement --keep words.txt",
            "--keep words.txt cannot be written: ",
        ),
        ("doctor --device gpu", "--device gpu: choose one of auto, cpu, cuda"),
        ("bench prune data --val nowhere", "nowhere: no such file or folder"),
        ("bench chaos --model resnet5", "--model resnet5: choose .*; did you mean resnet50"),
        ("train data --exchange allreduc", "exchange 'allreduc': .*; did you mean allreduce"),
        ("train data --lr inf", "--lr inf: give a finite number$"),
        ("train data --seed -1", "--seed -1: give a number from 0 to 18,446,744,073,709,551,615$"),
        ("run --exchange train.py", "SCRIPT is missing: .*; train.py is the value of --exchange "),
        ("run -n train.py", "SCRIPT is missing: .*; train.py is the value of -n "),
        ("run --check train.py --bs 3", "--bs: no such option; train.py is the value of --check "),
        ("train --val data --seed 3", "SRC is missing: training data; data is the value of --val "),
        ("ls --format=data", "PATH is missing: .*; data is the value of --format "),
        ("train data --val data --exam 3", "--exam: no such option \\("),
        ("ls words.txt", "words.txt is a file of text: write its samples to a column"),
    ],
)
def test_a_wrong_command_is_told_in_one_true_line(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    Image.new("RGB", (40, 40)).save(tmp_path / "data" / "a" / "0.png")
    (tmp_path / "my data").mkdir()
    (tmp_path / "words.txt").write_text("words\n")
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    line_said = errors.getvalue()
    assert line_said.count("\n") == 1
    assert len(line_said) < 400
    assert re.search(said, line_said.rstrip()), line_said


@pytest.mark.parametrize("command", [*COMMANDS.values()], ids=lambda command: command.name)
def test_an_empty_value_of_a_variable_that_is_not_set_is_told(command: Command) -> None:
    for field in command.fields:
        if field.type is str and not field.option.rest:
            with pytest.raises(UsageError, match=f"{field.flag}: the value is empty: "):
                command.run({field.name: ("x", "") if field.many else ""})


@pytest.mark.parametrize("command", [*COMMANDS.values()], ids=lambda command: command.name)
def test_each_value_has_a_meaning_and_each_number_a_limit(command: Command) -> None:
    for field in command.fields:
        assert len(field.meaning) >= 8
        assert "give text" not in field.meaning
        if field.type in (int, float) and field.option.parse is None:
            option = field.option  # Without a limit, negative and huge numbers would be taken.
            assert (option.least, option.above) != (None, None), field.flag
        assert field.option.rest or field.meaning[-1] not in ".,;:"


@pytest.mark.parametrize("command", [*COMMANDS.values()], ids=lambda command: command.name)
def test_defaults_are_shown_as_they_are_typed(command: Command) -> None:
    for field in command.fields:
        shown = default_of(field)
        assert not shown.startswith(("[", "("))
        if isinstance(field.default, int) and not isinstance(field.default, bool):
            assert shown or field.option.default_text is not None, field.flag


def test_a_switch_that_says_no_has_no_second_no(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = _shown(monkeypatch, capsys, "view", "--help")
    assert "\n  --no-browser " in shown
    assert "[default: 0]" in shown  # The seed's.


@pytest.mark.parametrize("group", ["bench", "cache"])
def test_commands_of_a_group_stand_under_a_heading_of_that_name(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _shown(monkeypatch, capsys, group, "--help").splitlines()
    assert "Commands:" in lines
    assert "Other:" not in lines


@pytest.mark.parametrize("word", sorted(_MEANT))
def test_words_of_other_tools_name_commands_that_there_are(word: str) -> None:
    assert word not in places()
    for meant in _MEANT[word].split(" or "):
        tokens = meant.partition(" (")[0].split()
        assert tokens[0] in {*places(), "--version", "--help"}
        if len(tokens) > 1:
            command = find_command(tokens)
            assert command is not None
            known = {field.flag for field in command.fields}
            assert tokens[1] in {command.name.split()[-1], *known}
