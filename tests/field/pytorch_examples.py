"""Scripts of https://github.com/pytorch/examples."""

import os
from typing import Final

import numpy as np
import torch
from PIL import Image

from tests.field.field_script import FieldScript
from tests.field.inputs import write_class_folders, write_mnist, write_text

_REPOSITORY: Final = "pytorch/examples"
_COMMIT: Final = "77f55b912142e11fcfdf5b530231fb9c52f181e8"
_NEVER: Final = r"(?!)"


def _mnist(folder: str) -> None:
    write_mnist(f"{folder}/../data", 300, 100)


def _imagenet(folder: str) -> None:
    write_class_folders(f"{folder}/imagenet/train", 40, 4, 96, 1)
    write_class_folders(f"{folder}/imagenet/val", 20, 4, 96, 2)


def _wikitext(folder: str) -> None:
    for seed, (part, words) in enumerate((("train", 3000), ("valid", 600), ("test", 600))):
        write_text(f"{folder}/data/wikitext-2/{part}.txt", words, 60, seed)


def _mnist_inside(folder: str) -> None:
    write_mnist(f"{folder}/data", 300, 100)


def _bsds(folder: str) -> None:
    """Write smooth pictures in place of the archive that the script would download."""
    for part, count, seed in (("train", 14, 1), ("test", 5, 2)):
        place = f"{folder}/dataset/BSDS300/images/{part}"
        os.makedirs(place)
        random = np.random.default_rng(seed)
        for number in range(count):
            small = random.integers(0, 255, (20, 24, 3)).astype(np.uint8)
            Image.fromarray(small).resize((260, 258)).save(f"{place}/{number}.jpg")


def _sines(folder: str) -> None:
    """Write fewer and shorter curves than `generate_sine_wave.py` does."""
    random = np.random.default_rng(2)
    places = np.arange(60) + random.integers(-80, 80, 12).reshape(12, 1)
    torch.save(np.sin(places / 20.0), f"{folder}/traindata.pt")


_MORE: Final = (
    FieldScript(
        "super_resolution",
        _REPOSITORY,
        _COMMIT,
        "super_resolution/main.py",
        tuple("--upscale_factor 4 --batchSize 4 --nEpochs 2 --threads 0 --lr 0.001".split()),
        _bsds,
    ),
    FieldScript(
        "forward_forward",
        _REPOSITORY,
        _COMMIT,
        "mnist_forward_forward/main.py",
        tuple("--epochs 12 --train_size 60 --test_size 50 --save_model".split()),
        _mnist_inside,
    ),
    FieldScript(
        "time_sequence",
        _REPOSITORY,
        _COMMIT,
        "time_sequence_prediction/train.py",
        ("--steps", "2"),
        _sines,
        environment={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"},
    ),
)
SCRIPTS: Final = _MORE + tuple(
    FieldScript(name, _REPOSITORY, _COMMIT, f"{name}/main.py", tuple(words.split()), make, times=t)
    for name, words, make, t in (
        ("mnist", "--epochs 2 --save-model", _mnist, _NEVER),
        ("vae", "--epochs 2 --batch-size 50", _mnist, _NEVER),
        ("mnist_rnn", "--epochs 2", _mnist, _NEVER),
        ("siamese_network", "--epochs 1 --batch-size 60 --save-model", _mnist, _NEVER),
        (
            "imagenet",
            "--epochs 2 -b 10 -j 2 -p 1 --seed 1 --lr 0.01",
            _imagenet,
            r"(Time|Data)\s+[\d.]+ \(\s*[\d.]+\)",
        ),
        (
            "dcgan",
            "--dataset mnist --dataroot ../data --niter 1 --manualSeed 3 --ngf 8 --ndf 8",
            _mnist,
            _NEVER,
        ),
        (
            "word_language_model",
            "--epochs 2 --emsize 32 --nhid 32 --log-interval 2",
            _wikitext,
            r"(time:|ms/batch)\s+[\d.]+",
        ),
    )
)
