"""Scripts of frameworks and other projects."""

import csv
import importlib
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from tests.field.field_script import FieldScript
from tests.field.inputs import write_class_folders

_NANO: Final = "n_layer=2 n_head=2 n_embd=32 block_size=32 batch_size=8 max_iters=20 eval_iters=4"


def _characters(folder: str) -> None:
    """Write a small text as nanoGPT's character sets are."""
    draws = random.Random(0)
    words = ["".join(draws.choices("abcdefghij", k=draws.randint(2, 7))) for _ in range(60)]
    text = " ".join(draws.choices(words, k=6000))
    letters = sorted(set(text))
    tokens = np.array([letters.index(each) for each in text], np.uint16)
    os.makedirs(f"{folder}/data/tiny")
    for name, part in (("train", tokens[:-3000]), ("val", tokens[-3000:])):
        part.tofile(f"{folder}/data/tiny/{name}.bin")
    with open(f"{folder}/data/tiny/meta.pkl", "wb") as file:
        pickle.dump({"vocab_size": len(letters)}, file)


def _nothing(_: str) -> None:
    """The script makes its own data."""


def _images(folder: str, count: int = 19) -> None:
    write_class_folders(f"{folder}/images/train", count, 5, 48, 1)
    write_class_folders(f"{folder}/images/val", 7, 5, 48, 2)


def _cats_and_dogs(folder: str) -> None:
    """Write the archive and the weights that Lightning's example would download."""
    root = f"{folder}/made/cats_and_dogs_filtered"
    write_class_folders(f"{root}/train", 42, 2, 64, 1)
    write_class_folders(f"{root}/validation", 18, 2, 64, 2)
    for each in Path(folder, "made").rglob("*"):
        os.utime(each, (1e9, 1e9))  # The archive has the times.
    os.makedirs(f"{folder}/data")
    shutil.make_archive(f"{folder}/data/cats_and_dogs_filtered", "zip", f"{folder}/made")
    weights = f"{folder}/cache/hub/checkpoints/resnet50-11ad3fa6.pth"
    os.makedirs(os.path.dirname(weights))
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    network = importlib.import_module("torchvision.models").resnet50()
    torch.save(network.state_dict(), weights)


_ACCURACY: Final = """
import datasets
import evaluate

class Accuracy(evaluate.Metric):
    def _info(self):
        whole = datasets.Value("int32")
        features = datasets.Features({"predictions": whole, "references": whole})
        return evaluate.MetricInfo("", "", features=features)

    def _compute(self, predictions, references):
        right = sum(p == r for p, r in zip(predictions, references))
        return {"accuracy": right / len(references)}
"""


def _sentences(folder: str) -> None:
    """Write sentences of two classes, a small BERT, and the metric that is otherwise downloaded."""
    words = [a + b for a in "bcdfgl" for b in ("a", "e", "i", "o", "un", "ort")]
    draws = random.Random(1)
    for name, count in (("train", 70), ("valid", 23)):
        with open(f"{folder}/{name}.csv", "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["sentence", "label"])
            for _ in range(count):
                label = draws.randrange(2)
                own = words[18:] if label else words[:18]
                each = draws.choices(own + words, k=draws.randint(4, 12))
                table.writerow([" ".join(each), label])
    os.makedirs(f"{folder}/accuracy")
    Path(folder, "accuracy/accuracy.py").write_text(_ACCURACY, encoding="utf-8")
    os.makedirs(f"{folder}/model")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    Path(folder, "model/vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    transformers: Any = importlib.import_module("transformers")
    importlib.import_module("torch").manual_seed(0)
    transformers.BertTokenizer(f"{folder}/model/vocab.txt").save_pretrained(f"{folder}/model")
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(f"{folder}/model")


_WANDB: Final = """
class _Nothing:
    def __getattr__(self, name):
        return self
    def __call__(self, *args, **options):
        return self

init = Image = Histogram = _Nothing()
"""


def _masks(folder: str) -> None:
    """Write pictures and masks of squares, and a stand-in for a service on the network."""
    random = np.random.default_rng(0)
    for number in range(22):
        mask = np.zeros((48, 48), np.uint8)
        top, left = random.integers(4, 30, 2)
        mask[top : top + 14, left : left + 14] = 1
        picture = mask[..., None] * 120 + random.integers(0, 100, (48, 48, 3))
        for kind, name, pixels in (("imgs", "", picture), ("masks", "_mask", mask)):
            os.makedirs(f"{folder}/data/{kind}", exist_ok=True)
            path = f"{folder}/data/{kind}/{number:02d}{name}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    Path(folder, "wandb.py").write_text(_WANDB, encoding="utf-8")


_TIMM: Final = (
    "images --model test_vit --num-classes 5 --img-size 160 -b 16 --epochs 2 -j 1 --lr 0.05 "
    "--log-interval 1 --device cpu --output out --experiment e --model-ema --seed 3 --no-aug "
)

SCRIPTS: Final = (
    FieldScript(
        "unet",
        "milesial/Pytorch-UNet",
        "21d7850f2af30a9695bbeea75f3136aa538cfc4a",
        "train.py",
        tuple("-e 1 -b 4 -l 1e-4 -s 1.0 -v 20 --bilinear".split()),
        _masks,
    ),
    *(
        FieldScript(
            name,
            "huggingface/pytorch-image-models",
            "aa4b5850c1543fa488abf260f18390eda46cf85d",
            "train.py",
            (*_TIMM.split(), *more.split()),
            lambda folder: _images(folder, 39),
            times=r"(Time|Data): .*",
        )
        for name, more in (
            (
                "timm_lamb",
                "--smoothing 0 --grad-accum-steps 2 --clip-grad 1.0 --opt lamb --warmup-epochs 1",
            ),
            (
                "timm_mixup",
                "--opt sgd --warmup-epochs 0 --mixup 0.4 --cutmix 1.0 --grad-accum-steps 2 "
                "--clip-grad 1.0",
            ),
        )
    ),
    FieldScript(
        "nanogpt",
        "karpathy/nanoGPT",
        "3adf61e154c3fe3fca428ad6bc3818b27a3b8291",
        "train.py",
        (
            "--dataset=tiny",
            "--device=cpu",
            "--dtype=float32",
            "--compile=False",
            *(f"--{each}" for each in _NANO.split()),
            "--gradient_accumulation_steps=2",
            "--eval_interval=10",
            "--warmup_iters=5",
            "--lr_decay_iters=20",
        ),
        _characters,
        times=r"time [\d.]+ms, mfu [-\d.]+%",
    ),
    FieldScript(
        "diffusion",
        "tanelp/tiny-diffusion",
        "726b6bbbf2c9e3d23dff9eaea2fda10d0af6a78c",
        "ddpm.py",
        tuple("--num_epochs 1 --num_timesteps 8 --eval_batch_size 100 --hidden_size 32".split()),
        _nothing,
    ),
    FieldScript(
        "timm",
        "huggingface/pytorch-image-models",
        "aa4b5850c1543fa488abf260f18390eda46cf85d",
        "train.py",
        tuple(
            "images --model test_vit --num-classes 5 --img-size 160 -b 16 --epochs 2 -j 1 "
            "--lr 0.05 --opt sgd --warmup-epochs 0 --log-interval 1 --device cpu --output out "
            "--experiment e --model-ema --seed 3 --no-aug".split()
        ),
        _images,
        times=r"(Time|Data): .*",
    ),
    FieldScript(
        "torchvision",
        "pytorch/vision",
        "775dd2d8f8e1bdba6178be88092edd420c5caea2",
        "references/classification/train.py",
        tuple(
            "--data-path images --model resnet18 --device cpu -b 16 --epochs 2 -j 0 --lr 0.01 "
            "--print-freq 1 --output-dir out --val-resize-size 36 --val-crop-size 32 "
            "--train-crop-size 32".split()
        ),
        _images,
        times=r"(img/s|time|data|eta): [\d.:]+|(Took|Training time) .*",
    ),
    FieldScript(
        "lightning_finetuning",
        "Lightning-AI/pytorch-lightning",
        "7f0c3436cd3f6ad3753125672024fc415cbcb414",
        "examples/pytorch/domain_templates/computer_vision_fine_tuning.py",
        tuple(
            "fit --trainer.max_epochs 3 --finetuning.milestones [1,2] --data.batch_size 8 "
            "--trainer.accelerator cpu --trainer.limit_train_batches 2 "
            "--trainer.limit_val_batches 1 --trainer.log_every_n_steps 1".split()
        ),
        _cats_and_dogs,
        environment={"TORCH_HOME": "cache"},
    ),
    FieldScript(
        "run_glue",
        "huggingface/transformers",
        "ae05b2ae619aa28fdfdcb8244009d585b7e1fed7",
        "examples/pytorch/text-classification/run_glue.py",
        tuple(
            "--model_name_or_path model --train_file train.csv --validation_file valid.csv "
            "--do_train --do_eval --num_train_epochs 2 --learning_rate 1e-3 --logging_steps 1 "
            "--eval_strategy epoch --save_strategy epoch --output_dir out --seed 5 --use_cpu "
            "--report_to none".split()
        ),
        _sentences,
        times=r"\d\d/\d\d/\d+ [\d:]+|default-\w+"
        r"|_(runtime|(samples|steps)_per_second)'?\s*[:=]\s+'?[\d.:]+",
        environment={"HF_HUB_OFFLINE": "1", "HF_HOME": "cache"},
    ),
)
