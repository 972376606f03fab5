"""Small data sets in the formats that scripts read, the same in each call."""

import os
import struct

import numpy as np
import numpy.typing as npt
from PIL import Image

Bytes = npt.NDArray[np.uint8]


def pictures_of_classes(count: int, classes: int, size: int, seed: int) -> tuple[Bytes, Bytes]:
    """Return grey pictures of shape (count, size, size), and the class of each, shape (count,).

    Pictures of a class are noise on a pattern of their own, so that a network learns to tell them.
    """
    patterns = np.random.default_rng(0).integers(0, 2, (classes, 7, 7))
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count).astype(np.uint8)
    labels[:classes] = np.arange(classes)
    large = np.kron(patterns, np.ones((-(-size // 7),) * 2))[:, :size, :size]
    noisy = large[labels] * 180 + random.integers(0, 76, (count, size, size))
    return noisy.astype(np.uint8), labels


def write_mnist(folder: str, train: int, test: int) -> None:
    """Write a data set in MNIST's format, as torchvision finds it below a folder."""
    raw = os.path.join(folder, "MNIST", "raw")
    os.makedirs(raw)
    for part, count, seed in (("train", train, 1), ("t10k", test, 2)):
        pictures, labels = pictures_of_classes(count, 10, 28, seed)
        with open(f"{raw}/{part}-images-idx3-ubyte", "wb") as file:
            file.write(struct.pack(">iiii", 0x803, count, 28, 28) + pictures.tobytes())
        with open(f"{raw}/{part}-labels-idx1-ubyte", "wb") as file:
            file.write(struct.pack(">ii", 0x801, count) + labels.tobytes())


def write_class_folders(folder: str, count: int, classes: int, size: int, seed: int) -> None:
    """Write colour pictures as PNG, a folder for each class."""
    pictures, labels = pictures_of_classes(count, classes, size, seed)
    for number, (picture, label) in enumerate(zip(pictures, labels, strict=True)):
        place = os.path.join(folder, f"class{label}")
        os.makedirs(place, exist_ok=True)
        colours = np.stack([picture, np.roll(picture, number % size, 0), 255 - picture], -1)
        Image.fromarray(colours).save(f"{place}/{number:04d}.png")


def write_text(path: str, words: int, vocabulary: int, seed: int) -> None:
    """Write a text of sentences in which each word depends on the one before."""
    random = np.random.default_rng(seed)
    follows = np.random.default_rng(0).integers(0, vocabulary, (vocabulary, 4))
    word, lines, line = 0, [], list[str]()
    for _ in range(words):
        word = int(follows[word, random.integers(0, 4)])
        line.append(f"word{word}")
        if word % 9 == 0:
            lines.append(" ".join(line) + " .\n")
            line = []
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(lines)
