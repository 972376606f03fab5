"""Data sets that use state of the process get worker processes, as in torch's loader."""

import logging
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dlio
from dlio.errors import UsageError
from dlio.util import printable

_COUNT = 256


@pytest.fixture(autouse=True)
def _untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printable, "_told", set())


def _drawn(_: object) -> torch.Tensor:
    """Numbers of all generators, with other Python code between the draws."""
    first = random.random()
    for _ in range(200):
        pass
    return torch.tensor([first, np.random.rand(), float(torch.rand(()))])  # noqa: NPY002


def _alike(value: Any) -> torch.Tensor:
    """Results of a transform for a picture and for its mask, called with one seed."""
    seed = int(np.random.randint(1 << 31))  # noqa: NPY002
    made = []
    for _ in range(2):
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        made.append(_drawn(value))
    return torch.stack(made)


class _Pairs(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return _COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return _alike(index)


class _Scratch(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Makes samples in a buffer that belongs to the class."""

    buffer = np.zeros(4)

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.buffer[:] = index
        for _ in range(200):
            pass
        return torch.tensor(self.buffer.copy()), index


def _differing(batches: Any) -> tuple[int, int]:
    """Return (pairs, those of which the halves differ)."""
    pairs = torch.cat([batch[0] if isinstance(batch, list) else batch for batch in batches])
    return len(pairs), int((pairs[:, 0] != pairs[:, 1]).any(1).sum())


def test_pairs_that_are_seeded_alike_stay_alike(caplog: pytest.LogCaptureFixture) -> None:
    loader = dlio.DataLoader(_Pairs(), batch_size=16, num_workers=2)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, "dlio"):
        batches = iter(loader)
        drawn = torch.get_rng_state()
        assert _differing(batches) == (_COUNT, 0)
        assert torch.equal(torch.get_rng_state(), drawn)
    assert not torch.equal(before, drawn)
    line = r"_Pairs: worker processes make its samples, since test_shared_state\.py:\d+ seeds"
    assert len(re.findall(line, caplog.text)) == 1
    assert "engine='torch' since test_shared_state.py" in repr(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_transforms_of_dlio_open_that_seed_are_called_with_their_seeds(
    workers: int, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    for k in range(64):
        Image.fromarray(np.full((8, 8, 3), k, np.uint8)).save(tmp_path / f"a/{k}.png")
    data = dlio.open(str(tmp_path), transform=_alike)
    loader = dlio.DataLoader(data, batch_size=8, num_workers=workers)
    before = torch.initial_seed()
    assert _differing(loader) == (64, 0)
    assert torch.initial_seed() == before
    assert "seeds random numbers, which threads would share" in repr(loader)


def test_chosen_threads_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dlio"):
        list(dlio.DataLoader(_Pairs(), batch_size=16, num_workers=2, workers="thread"))
    assert "threads share; so a mask may be changed otherwise than its picture" in caplog.text


def test_stateful_loaders_choose_processes_too() -> None:
    loader = dlio.StatefulDataLoader(_Pairs(), batch_size=16, num_workers=2)
    assert _differing(loader) == (_COUNT, 0)


def test_tiers_of_samples_that_are_seeded_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"seeds random numbers.*torch\.Generator\(\)"):
        list(dlio.DataLoader(_Pairs(), batch_size=16, num_workers=2, tiers="ram:1MiB"))


def test_buffers_of_classes_are_each_threads_own() -> None:
    loader = dlio.DataLoader(_Scratch(), batch_size=32, num_workers=4)
    assert "engine='threads'" in repr(loader)
    assert all((rows == index[:, None]).all() for rows, index in loader)
    assert not _Scratch.buffer.any()


def _tokenizer() -> Any:
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="[PAD]")
    rust = tokenizers.Tokenizer(words)
    rust.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=rust, pad_token="[PAD]")


class _Texts(torch.utils.data.Dataset[Any]):
    """Texts and summaries, each with its own longest length, of a tokenizer that pads to it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        text = " a" * (20 + index % 50)
        of_text = self.tokenizer(text, padding="max_length", truncation=True, max_length=80)
        summary = self.tokenizer(text, truncation=True, padding="max_length", max_length=40)
        return len(of_text["input_ids"]), len(summary["input_ids"])


class _Encoded(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [1] * (1 + index % 7)}


def test_texts_are_not_padded_and_cut_as_other_threads_have_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = _tokenizer()

    def collate(rows: Any) -> Any:
        tokenizer(["a"] * len(rows), padding="max_length", max_length=9)
        return rows

    with caplog.at_level(logging.WARNING, "dlio"):
        loader = dlio.DataLoader(_Texts(tokenizer), batch_size=8, num_workers=2)
        lengths = torch.cat([torch.stack(each, 1) for each in loader])
    assert lengths.tolist() == [[80, 40]] * 400
    assert tokenizer._tokenizer.padding is None  # A checkpoint holds it.
    line = r"_Texts: worker processes .* test_shared_state\.py:\d+ has the tokenizer tokenizer "
    assert len(re.findall(line, caplog.text)) == 1
    loader = dlio.DataLoader(_Encoded(), batch_size=8, num_workers=2, collate_fn=collate)
    assert "has the tokenizer tokenizer encode" in repr(loader)


def test_a_tokenizer_that_pads_what_was_encoded_is_for_threads() -> None:
    tokenizer = _tokenizer()
    transformers: Any = pytest.importorskip("transformers")

    def collate(rows: Any) -> Any:
        return tokenizer.pad(rows, return_tensors="pt")["input_ids"] != tokenizer.pad_token_id

    for each in (collate, transformers.DataCollatorWithPadding(tokenizer)):
        loader = dlio.DataLoader(_Encoded(), batch_size=8, num_workers=2, collate_fn=each)
        assert "engine='threads'" in repr(loader), each
        assert len(list(loader)) == 50


class _Stream:
    """A standard error, or a hook for exceptions, of a script's own."""

    last: object = None

    def __call__(self, *given: object) -> None:
        _Stream.last = given

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


@pytest.mark.parametrize("name", ["stderr", "excepthook"])
def test_what_a_thread_has_of_the_process_is_not_the_data_sets(
    pictures: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook. A data set has threads from its first pass on."""
    monkeypatch.setattr(sys, name, _Stream())
    with dlio.open(str(pictures), tiers="ram:4MiB", image_size=8) as data:
        first = dlio.DataLoader(data, 4, num_workers=2)
        assert sum(1 for _ in first) == len(first)
        with dlio.DataLoader(data, 4, num_workers=2) as second:
            assert sum(1 for _ in second) == len(second)
            assert second.stats()["engine"] == "planned"
        first.close()
