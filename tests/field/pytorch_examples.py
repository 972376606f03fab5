"""Scripts of https://github.com/pytorch/examples."""

from typing import Final

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


SCRIPTS: Final = tuple(
    FieldScript(name, _REPOSITORY, _COMMIT, f"{name}/main.py", tuple(words.split()), make, times=t)
    for name, words, make, t in (
        ("mnist", "--epochs 2 --save-model", _mnist, _NEVER),
        ("vae", "--epochs 2 --batch-size 50", _mnist, _NEVER),
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
