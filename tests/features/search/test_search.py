"""`dlio search` from the command line: its results, and what kills leave of them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

KILLS = '''
"""A callback that kills a process once, at a chosen epoch of a chosen trial."""
import os
import signal

import time

from dlio.train.callbacks import Callback

_early = os.environ.get("TEST_TOLD_EARLY", "")
if _early and "DLIO_TRIAL" in os.environ and not os.path.exists(_early):
    open(_early, "w").close()
    os.kill(int(os.environ["DLIO_LAUNCHER_PID"]), signal.SIGTERM)
    time.sleep(100)  # Until the searcher's signal comes.


class Kill(Callback):
    def epoch_ends(self, run, report):
        folder = os.environ["DLIO_TRIAL"]
        searcher = int(os.environ["DLIO_LAUNCHER_PID"])
        victims = {"rank": os.getpid(), "forker": os.getppid(), "searcher": searcher}
        for victim, trial, epoch in eval(os.environ.get("TEST_KILLS", "[]")):
            flag = f"{folder}/{victim}{epoch}"
            is_here = folder.endswith(f"{trial:04}") and report.epoch == epoch
            if is_here and not os.path.exists(flag):
                open(flag, "w").close()
                if victim == "told":
                    os.kill(searcher, signal.SIGTERM)
                else:
                    os.kill(victims[victim], signal.SIGKILL)
                    signal.pause()
'''
SCRIPT = """
import argparse
from types import SimpleNamespace

from kills import Kill
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
lr = parser.parse_args().lr
for epoch in range(3):
    Kill().epoch_ends(None, SimpleNamespace(epoch=epoch))
    print("dlio: metric loss", abs(lr - 0.03) / (epoch + 1))
"""


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder with small tables of two classes, `train.csv` and `val.csv`."""
    for name, count in (("train", 96), ("val", 32)):
        rows = ["a,b,label"]
        for k in range(count):
            a, b = (k * 37 % 101) / 50 - 1, (k * 53 % 97) / 48 - 1
            rows.append(f"{a:.3f},{b:.3f},{'x' if a * b > 0 else 'y'}")
        (tmp_path / f"{name}.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "kills.py").write_text(KILLS)
    return tmp_path


def _search(
    folder: Path, *words: str, kills: Sequence[object] = (), code: int = 0
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, "-P", "-m", "dlio.cli", "search", *words],
        cwd=folder,
        env={**os.environ, "TEST_KILLS": repr(list(kills))},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done


def _results(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def _train_words(study: str, ranks: int = 2) -> list[str]:
    return [
        *("train.csv", "--val", "val.csv", "--epochs", "4", "--json", "--study", study),
        *("--set", "lr=1e-4..1e-1:log", "--set", "batch-size=8,16", "--trials", "5"),
        *("--pruner", "asha", "--callback", "kills:Kill", "-n", str(ranks)),
        *("--cores-per-rank", "1"),
    ]


@pytest.mark.nightly
def test_kills_of_rank_forker_and_searcher_change_no_result(tables: Path) -> None:
    calm = _results(_search(tables, *_train_words("calm", ranks=1)))
    states = [trial["state"] for trial in calm["trials"]]
    assert (states.count("complete") + states.count("pruned"), len(states)) == (5, 5)
    assert states.count("pruned") >= 1
    assert calm["trial_source_bytes"] == 0

    kills = [("rank", 0, 0), ("forker", 0, 1), ("rank", 1, 0), ("searcher", 0, 2)]
    words = _train_words("stormy")
    _search(tables, *words, kills=kills, code=-signal.SIGKILL)
    ended = _search(tables, *words, kills=[("told", 0, 3)], code=75)
    assert "the same command goes on" in ended.stdout
    stormy = _results(_search(tables, *words, kills=kills))
    assert sorted(each.name for each in tables.glob("stormy/trials/000[01]/[rfst]*[0-9]")) == [
        *("forker1", "rank0", "rank0", "searcher2", "told3"),
    ]
    assert stormy["trials"] == calm["trials"]
    assert stormy["best"][0]["values"] == calm["best"][0]["values"]
    assert stormy["staged_bytes"] == calm["staged_bytes"]
    # Weights of the best trial are left, and no checkpoints.
    weights = list(tables.glob("stormy/trials/*/weights.pt"))
    assert [str(each) for each in weights] == [str(tables / stormy["best"][0]["weights"])]
    assert not list(tables.glob("stormy/trials/*/checkpoint"))
    # All is done: nothing more is trained or staged.
    assert _results(_search(tables, *words))["trials"] == calm["trials"]


def test_a_search_that_is_told_to_end_goes_on_from_checkpoints(tables: Path) -> None:
    words = [*_train_words("told"), "--trials", "2"]
    _search(tables, *words, kills=[("told", 0, 1)], code=75)
    log = tables / "told/trials/0000/log.txt"
    assert "told to end at epoch 3" in log.read_text()
    results = _results(_search(tables, *words))
    assert "resumed from" in log.read_text()
    assert log.read_text().count("epoch 2/4") == 1
    assert [len(trial["epochs"]) for trial in results["trials"]] == [4, 4]
    assert (results["trial_source_bytes"], len(results["best"])) == (0, 1)


@pytest.mark.parametrize("is_script", [False, True])
def test_a_trial_that_is_told_to_end_before_it_begins_has_not_failed(
    tables: Path, is_script: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_TOLD_EARLY", str(tables / "early"))
    words = [*_train_words("told", ranks=1), "--trials", "1"]
    if is_script:
        (tables / "script.py").write_text(SCRIPT)
        words = ["--set", "lr=0.1,0.2", "--objective", "loss", "--trials", "1", "--json"]
        words += ["--", "script.py", "--lr", "{lr}"]
    ended = _search(tables, *words, code=75)
    assert "failed" not in ended.stdout
    trials = _results(_search(tables, *words))["trials"]
    assert [trial["state"] for trial in trials] == ["complete"]


def test_a_script_is_searched_by_its_metric_lines_whatever_is_killed(tables: Path) -> None:
    (tables / "script.py").write_text(SCRIPT)
    page = tables / "page.html"
    words = ["--set", "lr=0.01,0.03,0.1,1", "--sampler", "grid", "--objective", "loss"]
    words += ["--pruner", "asha", "--epochs", "3", "-n", "2", "--html", str(page), "--json"]
    words += ["--", "script.py", "--lr", "{lr}"]
    kills = [("rank", 0, 1), ("forker", 1, 0), ("searcher", 1, 2)]
    _search(tables, *words, kills=kills, code=-signal.SIGKILL)
    results = _results(_search(tables, *words, kills=kills))
    assert sorted(each.name for each in tables.glob("search/trials/*/[rfs]*[0-9]")) == [
        *("forker0", "rank1", "searcher2"),
    ]
    for trial, lr in zip(results["trials"], (0.01, 0.03, 0.1, 1), strict=True):
        losses = [[abs(lr - 0.03) / (epoch + 1)] for epoch in range(3)]
        assert trial["epochs"] == losses[: len(trial["epochs"])]
    assert [each["state"] for each in results["trials"]] == ["complete"] * 2 + ["pruned"] * 2
    assert [len(each["epochs"]) for each in results["trials"]] == [3, 3, 1, 1]
    assert results["best"][0]["command"] == "dlio run script.py --lr 0.03"
    assert results["best"][0]["values"] == {"loss": 0}
    text = page.read_text()
    assert "dlio run script.py --lr 0.03" in text
    assert text.count("Plotly.newPlot") >= 3
    assert "<script src" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.csv"], "--set is missing"),
        (["train.csv", "--set", "lt=1..2"], "did you mean lr?"),
        (["train.csv", "--set", "lr=1..2", "--tiers", "ram:1GiB"], "/dev/shm/search:8GiB"),
        (["train.csv", "--set", "lr=1..2", "--save", "x"], "kept in --study"),
        (["--set", "lr=1..2", "--", "none.py"], "no such script"),
        (["--set", "lr=1..2"], "SRC is missing"),
        (["--set", "lr=1..2", "--clip", "0.9", "--objective", "a", "--", "kills.py"], "--clip is"),
        (["train.csv", "--set", "lr=1..2", "--reduction", "2"], "need --pruner"),
        (["train.csv", "--set", "lr=1..2", "--pruner", "asha", "--epochs", "1"], "more --epochs"),
        (["train.csv", "--set", "lr=1..2", "--sampler", "grid"], "list its values"),
        (["train.csv", "--set", "lr=1..2", "--ranks-per-trial", "2"], "-n with at least"),
    ],
)
def test_options_that_cannot_work_are_refused(tables: Path, words: list[str], said: str) -> None:
    assert said in _search(tables, *words, code=2).stderr


def test_a_search_whose_trials_all_fail_says_why(tables: Path) -> None:
    words = ["train.csv", "--set", "lr=1..2", "--epochs", "1", "--objective", "val_iou"]
    done = _search(tables, *words, "--trials", "2", code=2)
    assert "--objective val_iou: no such metric" in done.stderr


def test_trials_without_a_finite_value_fail_with_the_reason_and_the_rest_is_json(
    tmp_path: Path,
) -> None:
    (tmp_path / "odd.py").write_text(
        "import sys\n"
        "x = float(sys.argv[1])\n"
        "for epoch in range(3):\n"
        "    odd = {2: 'nan', 3: 'inf', 4: '4.0' if epoch == 0 else 'nan'}\n"
        "    print('dlio: metric loss', odd.get(x, x - epoch / 10))\n"
    )
    words = ["--sampler", "grid", "--epochs", "3", "--objective", "loss", "-n", "1", "--json"]
    for pruner in ("none", "asha"):
        argv = [*words, "--set", "x=1,2,3,4,0.5", "--study", pruner, "--pruner", pruner]
        done = _search(tmp_path, *argv, "--html", f"{pruner}.html", "--", "odd.py", "{x}")
        constants: list[str] = []
        result = json.loads(done.stdout.splitlines()[-1], parse_constant=constants.append)
        assert not constants
        assert [each["parameters"] for each in result["best"]] == [{"x": 0.5}]
        states = {each["parameters"]["x"]: each for each in result["trials"]}
        # A NaN ends a trial at once, and says so; a pruner that compares alone might keep it.
        assert (states[2]["state"], states[2]["epochs"]) == ("failed", [[None]])
        assert states[2]["note"] == "loss is nan: stopped after epoch 1"
        if pruner == "none":
            assert (states[3]["state"], states[3]["note"]) == ("failed", "loss is inf")
            assert (states[4]["state"], states[4]["epochs"]) == ("failed", [[4.0], [None]])
            assert states[4]["note"] == "loss is nan: stopped after epoch 2"
        else:
            assert states[3]["state"] in ("failed", "pruned")
            assert states[4]["epochs"][0] == [4.0]
        page = (tmp_path / f"{pruner}.html").read_text()
        shown = page.split('id="trials">')[1].split("</script>")[0]
        assert json.loads(shown, parse_constant=constants.append) == result["trials"]
        assert not constants
