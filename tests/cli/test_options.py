"""Options: each is stated once, in a record that command line, file and variables fill."""

import ast
import dataclasses
import inspect
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlio.cli import app, main
from dlio.cli.app import all_commands, places
from dlio.cli.cli_command import Command
from dlio.errors import UsageError
from dlio.launch import mpi_launch
from dlio.train.config import train_config
from dlio.util.options import OptionField, as_mapping, from_mapping, options_of
from dlio.util.settings import SETTINGS
from tests.conftest import has_feature

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {command.name: command for command in all_commands()}
FIELDS = {(each.record, each.name): each for c in COMMANDS.values() for each in c.fields}


def test_all_commands_take_records_of_options() -> None:
    inner = {name for name in COMMANDS if " " in name}
    assert {name.split()[0] for name in COMMANDS} == set(places())
    assert len(inner) >= 11


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_the_help_of_every_option_is_a_sentence(command: Command) -> None:
    assert command.help.split("\n")[0].endswith(".")
    for field in command.fields:
        text = field.option.help
        assert text.endswith((".", ")")), field.flag
        assert text.split()[0] not in ("Of", "What", "That", "Whether", "Who"), field.flag


@pytest.mark.parametrize("command", COMMANDS.values(), ids=lambda command: command.name)
def test_names_of_a_command_are_distinct(command: Command) -> None:
    flags = [field.flag for field in command.fields]
    names = [field.name for field in command.fields]
    shorts = [field.option.short for field in command.fields if field.option.short]
    assert len(set(flags)) == len(flags)
    assert len(set(names)) == len(names)
    assert len(set(shorts)) == len(shorts)


def test_no_default_is_stated_in_two_places() -> None:
    """Only the record states a default; the function of a command and its help do not."""
    for command in COMMANDS.values():
        for parameter in inspect.signature(command.function).parameters.values():
            assert parameter.default is parameter.empty, command.name
        for field in command.fields:
            assert "efault" not in field.option.help, field.flag
    for name, (module, tree) in _modules().items():
        for record, name_, stated in _stated(tree, module):
            option = FIELDS.get((record, name_))
            assert option is None or stated == 1, (name, name_)


def _modules() -> dict[str, tuple[Any, ast.Module]]:
    """Return the modules that state options, with their syntax trees."""
    modules = {record.__module__ for record, _ in FIELDS}
    return {
        name: (sys.modules[name], ast.parse(inspect.getsource(sys.modules[name])))
        for name in modules
    }


def _stated(tree: ast.Module, module: Any) -> list[tuple[type, str, int]]:
    """Return (record, field, number of places with a default) for each option of a module.

    Such places are annotated fields, and parameters of functions with the same name. A default of
    None or False does not count: it means that the option is absent.
    """
    parameters: dict[str, int] = defaultdict(int)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            last = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            pairs = [*zip(last, node.args.defaults, strict=True)]
            pairs += [
                (argument, default)
                for argument, default in zip(
                    node.args.kwonlyargs, node.args.kw_defaults, strict=True
                )
                if default is not None
            ]
            for argument, default in pairs:
                if not isinstance(default, ast.Constant) or default.value not in (None, False):
                    parameters[argument.arg] += 1
    stated = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            record = getattr(module, node.name)
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    name = line.target.id
                    stated.append((record, name, 1 + parameters[name]))
    return stated


@pytest.mark.parametrize("field", FIELDS.values(), ids=lambda f: f"{f.record.__name__}.{f.name}")
def test_a_default_is_a_value_that_the_option_takes(field: OptionField) -> None:
    if field.required or field.option.rest:
        return
    field.check(field.default)
    assert field.convert(field.show(field.default), field.flag) == field.default


def test_records_survive_json() -> None:
    for record in {record for record, _ in FIELDS}:
        required = {each.name: "x" for each in options_of(record) if each.required}
        try:
            made = record(**required)
        except UsageError:
            continue  # It is invalid with its required options alone.
        assert from_mapping(record, json.loads(json.dumps(as_mapping(made)))) == made


def test_every_variable_is_in_the_reference() -> None:
    assert all(setting.name.startswith("DLIO_") and setting.help for setting in SETTINGS)


def _ended(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    return ended.value.code or 0, *capsys.readouterr()


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "pictures", "--epochs", "5", "--lr", "1e-3", "--replica", "a", "--replica", "b"],
        ["train", "pictures", "-n", "2", "--nan", "off", f"--seed={2**64 - 1}"],
        ["stage", "data", "--tiers", "/scratch:20GiB", "--bwlimit", "1500MiB/s", "--no-resume"],
        ["stage", "data", "--include", "n01*/*", "--deadline", "60", "--verify", "none", "--pin"],
        ["pack", "data", "packed", "--split", "train=0.9,val=0.1", "--shard-size", "100MiB"],
        ["pack", "data", "packed", "--no-restart-rows", "--format", "tar", "--workers", "3"],
    ],
)
def test_a_printed_configuration_is_read_back(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, printed, errors = _ended(capsys, *argv, "--print-config")
    assert code == 0, errors
    assert set(yaml.safe_load(printed)) == {f.key for f in COMMANDS[argv[0]].config_fields}
    file = tmp_path / "run.yaml"
    file.write_text(printed)
    assert _ended(capsys, argv[0], "--config", str(file), "--print-config")[1] == printed


def test_other_libraries_do_not_change_how_options_are_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cyclopts validates by pydantic where something has loaded it, such as a model's module."""
    pytest.importorskip("pydantic")
    code, _, errors = _ended(capsys, "stage", "data", "--tiers", "ram:1GiB", "--print-config")
    assert code == 0, errors


def test_the_command_line_overrides_the_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("source: a\nepochs: 7\nresume: true\nnan: off\nlr: 1e-3\nbatch-size: 8\n")
    options = ["--config", str(file), "--epochs", "9", "--no-resume", "--print-config"]
    code, printed, errors = _ended(capsys, "train", *options)
    assert code == 0, errors
    stated = yaml.safe_load(printed)
    assert (stated["source"], stated["epochs"], stated["resume"]) == ("a", 9, False)
    assert (stated["nan"], stated["lr"], stated["batch_size"]) == ("off", 0.001, 8)
    assert yaml.safe_load(_ended(capsys, "train", "b", *options)[1])["source"] == "b"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epoch: 3", ("run.yaml: epoch:", "no such option", "did you mean epochs?")),
        ("epochs: three", ("run.yaml: epochs: three: give an integer",)),
        ("epochs: 2.5", ("run.yaml: epochs: 2.5: give an integer",)),
        ("epochs: 0", ("run.yaml:", "--epochs 0: give at least 1")),
        ("resume: 1", ("run.yaml: resume: 1: give true or false",)),
        ("optimizer: adma", ("run.yaml:", "--optimizer adma", "adamw")),
        ("epochs:", ("run.yaml: epochs:", "give an integer")),
        ("- epochs", ("run.yaml", "name: value")),
        ("epochs: [", ("run.yaml", "YAML")),
        ("!!python/object/apply:os.getcwd []", ("run.yaml", "YAML")),
    ],
)
def test_an_invalid_file_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    code, _, errors = _ended(capsys, "train", "x", "--config", str(file), "--print-config")
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert all(word in errors for word in words), errors


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = _ended(capsys, "train", "x", "--config", "no/such.yaml")
    assert code == 2
    assert "no/such.yaml" in errors


def test_arguments_after_the_script_are_passed_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlio.cli import run

    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(
        run, "on_ranks", lambda *given, **_: seen.append({"ranks": given[0], "script": given[2]})
    )
    monkeypatch.setenv("DLIO_FOLLOW_LINKS", "0")  # The command sets it.
    argv = ["run", "-n", "3", "--exchange=gossip", "--follow-links"]
    argv += [*(["--balance"] if has_feature("balance") else []), "--seed", "4", "train.py"]
    for more in (["--epochs", "3", "-n", "7", "--help"], ["--", "-x"], []):
        with pytest.raises(SystemExit) as ended:
            main([*argv, *more])
        assert not ended.value.code
        assert seen[-1]["ranks"] == 3
        assert dataclasses.astuple(seen[-1]["script"]) == ("train.py", tuple(more))


@pytest.mark.cold
def test_the_launcher_of_ranks_does_not_import_torch(pictures: Path, tmp_path: Path) -> None:
    """The launcher checks options, model, data and tiers; a stub takes the record."""
    more = ["--skip-samples"] if has_feature("skipping") else []
    text = (
        "import json, os, subprocess, sys\n"
        "from dlio.cli import main\nfrom dlio.launch import mpi_launch\n"
        "def start(argv, ranks, *, environment, **_):\n"
        "    task = json.loads(environment['DLIO_RECORD'])\n"
        "    loaded = [m for m in ('torch', 'mpi4py') if m in sys.modules]\n"
        "    print(json.dumps([ranks, task['records'][0][1]['epochs'], loaded]))\n"
        "    return subprocess.CompletedProcess(argv, 0)\n"
        "mpi_launch.launch = start\n"
        f"main(['train', {str(pictures)!r}, '-n', '4', '--epochs', '9', *{more},"
        " '--exchange', 'gossip+int8', '--model', 'resnet(width=8)'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert json.loads(done.stdout) == [4, 9, []]


def test_a_record_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlio.cli.train_command import train_rank
    from dlio.launch.command_ranks import on_ranks

    done = subprocess.CompletedProcess[str]([], 0)
    monkeypatch.setattr(mpi_launch, "launch", lambda *_, **__: done)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALNRANKS"):
        monkeypatch.delenv(name, raising=False)
    config = train_config("x", replica=tuple(f"/replica/{number:05d}" for number in range(9000)))
    with pytest.raises(UsageError, match="characters long"):
        on_ranks(2, train_rank, config)


def test_completion_knows_commands_and_options() -> None:
    from dlio.cli.app import make_app

    script = make_app().generate_completion(shell="bash")
    assert all(word in script for word in ("verify", "--lr-schedule", "--bwlimit", "-n"))


def test_a_command_that_cannot_be_loaded_says_so_whatever_its_options_are() -> None:
    broken = app._broken("stage", "somewhere:stage", EOFError("marshal data too short"))
    with pytest.raises(UsageError, match="cannot be loaded: marshal data too short"):
        broken(["data", "--tiers", "/local:1GiB"], exit_on_error=False, print_error=False)
