"""Data that several benchmarks read, and its files."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def packed_noise(samples: int, sample_bytes: int) -> Iterator[str]:
    """Native shards of samples that cannot be compressed; removed afterwards."""
    from dlio_staging.pack_folder import pack

    with tempfile.TemporaryDirectory(prefix="dlio-bench-") as scratch:
        source, packed = os.path.join(scratch, "samples.npy"), os.path.join(scratch, "packed")
        data = np.random.default_rng(0).integers(0, 256, (samples, sample_bytes), np.uint8)
        np.save(source, data)
        del data
        pack(source, packed, compress="none")
        yield packed


def files_below(folder: str) -> list[str]:
    """Return the paths of all files in a folder and in those below it."""
    return [os.path.join(inside, name) for inside, _, names in os.walk(folder) for name in names]


def bytes_below(folder: str) -> int:
    """Return the bytes of all files in a folder and in those below it."""
    return sum(map(os.path.getsize, files_below(folder)))


def payload_bytes(path: str) -> int:
    """Return the bytes of all samples of a data set."""
    from dlio.data.reader import open_reader
    from dlio.data.reader_contract import data_bytes

    with contextlib.closing(open_reader(path)) as reader:
        return data_bytes(reader)


def draw_pictures(folder: str, images: int, held_out: int = 3, classes: int = 3) -> tuple[str, str]:
    """Draw JPEGs into class folders below `folder`; return training and held-out data."""
    from dlio.cli.demo_pictures import draw_dataset
    from dlio.util.cores import available_cores

    drawn = os.path.join(folder, "pictures")
    draw_dataset(
        drawn, images=images, validation=held_out, classes=classes, threads=available_cores()
    )
    return os.path.join(drawn, "train"), os.path.join(drawn, "val")


def draw_small_pictures(folder: str, images: int, side: int, classes: int = 10) -> str:
    """Draw JPEGs of side x side pixels into class folders `folder`/pictures/0 and on, of smooth
    colours and some noise; return the folder of the classes."""
    import simplejpeg

    from dlio.image.decoder import opencv

    cv2, generator = opencv(), np.random.default_rng(0)
    drawn = os.path.join(folder, "pictures")
    for number in range(classes):
        os.makedirs(os.path.join(drawn, str(number)))
    for number in range(images):
        pixels = cv2.resize(generator.integers(0, 240, (8, 8, 3), np.uint8), (side, side))
        pixels += generator.integers(0, 16, pixels.shape, np.uint8)
        encoded = simplejpeg.encode_jpeg(pixels, quality=90, colorsubsampling="420")
        with open(os.path.join(drawn, str(number % classes), f"{number:06d}.jpg"), "wb") as file:
            file.write(encoded)
    return drawn


def ram_tier(size: int) -> str:
    """Return a RAM tier with room for so many payload bytes."""
    return f"ram:{int(1.2 * size) + (64 << 20)}B"
