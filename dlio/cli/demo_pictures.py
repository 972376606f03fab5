"""Draw the pictures of `dlio demo`, a data set that takes seconds to draw and can be learnt.

There are ten classes of shapes and textures in random colours, sizes, positions and rotations, on
noisy backgrounds. A small network learns to tell them apart, but not by colour alone.
"""

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dlio.errors import UsageError
from dlio.image.decoder import opencv
from dlio.util.folders import new_folder
from dlio.util.input_files import MOST_SETTINGS, read_json
from dlio.util.trusted_files import open_new
from dlio.util.units import counted
from dlio.util.user_folders import make_folders, parent_of
from dlio.util.whole_files import unwritable, write_json

IMAGES: Final = 2400
"""Pictures to train on that the demo draws."""
_MARK = "drawn.json"
_VERSION = 1
_QUALITY = 88
_SEED = 0

Image = npt.NDArray[np.uint8]
Colour = tuple[int, int, int]
_Painter = Callable[[Image, np.random.Generator, Colour], None]


def draw_dataset(
    folder: str,
    *,
    images: int = IMAGES,
    validation: int = 400,
    classes: int = 10,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Draw `folder`/train/<class>/*.jpg and `folder`/val/<class>/*.jpg, once.

    The folder appears complete or not at all; a complete one is not drawn again. The pictures are
    the same each time. `images` and `validation` count those of all classes together; `progress` is
    called with (pictures drawn, all pictures).

    Raises UsageError if the folder holds anything else, or for an invalid number of classes.
    """
    if not 2 <= classes <= len(PAINTERS):
        raise UsageError(f"cannot draw {counted(classes, 'class')}: give 2 to {len(PAINTERS)}")
    asked = {
        "version": _VERSION,
        "images": images,
        "validation": validation,
        "classes": classes,
        "seed": _SEED,
    }
    if os.path.exists(folder):
        if _mark(folder) == asked:
            return
        raise UsageError(f"{folder} holds something else, not these pictures: remove or rename it")
    try:
        with new_folder(folder) as temporary:
            _draw_all(temporary, asked, threads, progress)
    except OSError as error:
        raise unwritable(folder, error) from error


def _draw_all(
    temporary: str,
    asked: Mapping[str, int],
    threads: int,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Draw the pictures into an empty folder, and mark it as complete."""
    classes, images = asked["classes"], asked["images"]
    names = sorted(PAINTERS)[:classes]
    jobs = [
        (os.path.join(temporary, part, names[k % classes], f"{k // classes:05d}.jpg"), k, offset)
        for part, count, offset in (("train", images, 0), ("val", asked["validation"], images))
        for k in range(count)
    ]
    for path, _, _ in jobs[:classes] + jobs[images : images + classes]:
        os.close(make_folders(os.path.dirname(path)))
    with ThreadPoolExecutor(threads) as pool:
        drawn = pool.map(lambda job: _write(job[0], names[job[1] % classes], job[1] + job[2]), jobs)
        for done, _ in enumerate(drawn, start=1):
            if progress is not None:
                progress(done, len(jobs))
    write_json(os.path.join(temporary, _MARK), asked)


def is_complete(folder: str) -> bool:
    """True if `draw_dataset` has drawn the folder."""
    return _mark(folder) is not None


def _mark(folder: str) -> Any:
    try:
        return read_json(os.path.join(folder, _MARK), MOST_SETTINGS)
    except (OSError, ValueError):
        return None


def _write(path: str, name: str, number: int) -> None:
    image = draw(name, np.random.default_rng([_SEED, number]))
    done, encoded = opencv().imencode(".jpg", image, [opencv().IMWRITE_JPEG_QUALITY, _QUALITY])
    assert done
    with parent_of(path) as (folder, name), open_new(folder, name) as file:
        file.write(encoded.tobytes())


def draw(name: str, random: np.random.Generator) -> Image:
    """Draw one picture of a class; uint8, shape (height, width, 3), sides of 200 to 500 pixels."""
    cv2 = opencv()
    height, width = (int(side) for side in random.integers(200, 501, 2))
    ground, ink = _colours(random)
    other = np.clip(ground + random.normal(0, 25, 3), 0, 255)
    slope = np.linspace(0, 1, width)[None, :, None] * random.random() + (
        np.linspace(0, 1, height)[:, None, None] * random.random()
    )
    image = np.clip(ground + (other - ground) * slope, 0, 255).astype(np.uint8)
    PAINTERS[name](image, random, ink)
    # Add coarse and fine noise, so that no pixel has exactly one of the colours.
    coarse = random.normal(0, 14, (height // 16 + 2, width // 16 + 2, 3)).astype(np.float32)
    noise = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    noise += random.normal(0, 8, (height, width, 1)).astype(np.float32)
    drawn: Image = np.clip(image + noise, 0, 255).astype(np.uint8)
    return drawn


def _colours(random: np.random.Generator) -> tuple[npt.NDArray[np.float64], Colour]:
    """Draw a background and a foreground colour of different brightness."""
    while True:
        ground, ink = random.uniform(20, 235, (2, 3))
        if abs(float((ground - ink).mean())) > 45:
            return ground, (int(ink[0]), int(ink[1]), int(ink[2]))


def _turned(points: npt.NDArray[np.float64], random: np.random.Generator, image: Image) -> Any:
    """Rotate, scale and shift points of radius 1 to a random place on the image; dtype int32."""
    height, width = image.shape[:2]
    radius = random.uniform(0.08, 0.22) * min(height, width)
    angle = random.uniform(0, 2 * math.pi)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    place = random.uniform((0, 0), (width, height))
    return np.round(points @ turn.T * radius + place).astype(np.int32)


def _polygons(corners: npt.NDArray[np.float64]) -> _Painter:
    def paint(image: Image, random: np.random.Generator, ink: Colour) -> None:
        for _ in range(int(random.integers(8, 17))):
            opencv().fillPoly(image, [_turned(corners, random, image)], ink)

    return paint


def _circle(count: int, radii: tuple[float, ...] = (1.0,)) -> npt.NDArray[np.float64]:
    """Return corners at equal angles, at alternating radii; shape (count, 2)."""
    angles = np.arange(count) * 2 * math.pi / count
    radius = np.array([radii[k % len(radii)] for k in range(count)])
    return np.stack([radius * np.cos(angles), radius * np.sin(angles)], axis=1)


def _field(image: Image, random: np.random.Generator) -> tuple[Any, Any, float]:
    """Return each pixel's coordinates along two randomly rotated axes, and a texture's period."""
    height, width = image.shape[:2]
    angle = random.uniform(0, math.pi)
    y, x = np.mgrid[0:height, 0:width]
    u = x * math.cos(angle) + y * math.sin(angle)
    v = y * math.cos(angle) - x * math.sin(angle)
    return u, v, float(random.uniform(0.09, 0.2) * min(height, width))


def _texture(inked: Callable[[Any, Any, float], Any]) -> _Painter:
    """Return the painter of a texture that inks pixels by their coordinates and its period."""

    def paint(image: Image, random: np.random.Generator, ink: Colour) -> None:
        image[inked(*_field(image, random))] = ink

    return paint


def _waves(u: Any, v: Any, period: float) -> Any:
    bent = u + 0.45 * period * np.sin(v * 2 * math.pi / (1.8 * period))
    return bent % period < period / 2


def _dots(u: Any, v: Any, period: float) -> Any:
    near = (u % period - period / 2) ** 2 + (v % period - period / 2) ** 2
    return near < (0.32 * period) ** 2


def _rings(image: Image, random: np.random.Generator, ink: Colour) -> None:
    height, width = image.shape[:2]
    for _ in range(int(random.integers(5, 11))):
        radius = random.uniform(0.08, 0.24) * min(height, width)
        place = (int(random.uniform(0, width)), int(random.uniform(0, height)))
        opencv().circle(image, place, int(radius), ink, max(2, int(radius / 3)))


def _spirals(image: Image, random: np.random.Generator, ink: Colour) -> None:
    height, width = image.shape[:2]
    y, x = np.mgrid[0:height, 0:width]
    middle_y, middle_x = random.uniform(0.25, 0.75, 2) * (height, width)
    radius = np.hypot(y - middle_y, x - middle_x)
    period = random.uniform(0.1, 0.2) * min(height, width)
    turn = random.choice([-1, 1]) * np.arctan2(y - middle_y, x - middle_x) / (2 * math.pi)
    image[(radius / period + turn) % 1 < 0.5] = ink


_ARM: Final = np.array([[1, 3], [1, 1], [3, 1]])
_RIGHT_ANGLE: Final = np.array([[0, -1], [1, 0]])
_CROSS: Final = np.concatenate(
    [_ARM @ np.linalg.matrix_power(_RIGHT_ANGLE, k) for k in range(4)]
) / np.float64(3)

PAINTERS: Final[dict[str, _Painter]] = {
    "checkers": _texture(lambda u, v, t: (u % (2 * t) < t) ^ (v % (2 * t) < t)),
    "crosses": _polygons(_CROSS),
    "dots": _texture(_dots),
    "rings": _rings,
    "spirals": _spirals,
    "squares": _polygons(_circle(4)),
    "stars": _polygons(_circle(10, (1.0, 0.4))),
    "stripes": _texture(lambda u, _, period: u % period < period / 2),
    "triangles": _polygons(_circle(3)),
    "waves": _texture(_waves),
}
"""Functions that draw a class's shapes or texture, by class name."""
