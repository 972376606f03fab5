"""dlio's own decoder gives libjpeg-turbo's pixels, or leaves the image to it."""

import functools
import importlib.util
import io
import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from dlio.errors import DecodeError
from dlio.image import decoder, native
from dlio.image.crop import Box, Crop
from dlio.image.decoder import Decoder, decode_whole
from dlio.image.native.build import compiler
from tests.image.jpegs import KINDS, box_within, drawn, whole

LEFT_TO_OTHERS = ("progressive", "cmyk")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, native.NativeLibrary]:
    """The library as it is used, and built without most of the compiler's optimisations."""
    if not os.path.exists(native.LIBRARY) or native.NativeLibrary().instructions != "AVX2":
        pytest.skip(native.name())
    made = {"usual": native.NativeLibrary()}
    if compiler() is not None:
        folder = tmp_path_factory.mktemp("native")
        build = importlib.import_module("dlio.image.native.build").build
        made["plain"] = native.NativeLibrary(build(str(folder), ("-O1",)))
    return made


def _compare(
    library: native.NativeLibrary, image: bytes, box: Box, expected: npt.NDArray[np.uint8]
) -> bool:
    """True if the library decodes the box, to the expected pixels; False if it refuses."""
    made = library.crop(image, box.top, box.left, box.height, box.width)
    if made is None:
        return False
    pixels, left = made
    pixels = pixels[:, box.left - left :][:, : box.width]
    part = expected[box.top : box.top + box.height, box.left : box.left + box.width]
    assert np.array_equal(pixels, part)
    return True


def _sweep(
    libraries: dict[str, native.NativeLibrary], crops: int, images: list[bytes], seed: int
) -> dict[str, int]:
    """Compare random crops of drawn and given images; return crops per kind that were decoded."""
    generator = np.random.default_rng(seed)
    decoded = dict.fromkeys((*KINDS, "real"), 0)
    names = list(libraries)
    for k in range(crops):
        kind = KINDS[k % len(KINDS)]
        image = drawn(generator, kind)
        if images and k % 3 == 2:
            kind, image = "real", images[k // 3 % len(images)]
        if kind == "cmyk":
            assert libraries["usual"].shape(image) is None
            continue
        expected = whole(image)
        for name in names if kind != "real" else names[k % 2 : k % 2 + 1]:
            box = box_within(generator, *expected.shape[:2])
            decoded[kind] += _compare(libraries[name], image, box, expected)
    return decoded


def test_random_crops_have_the_pixels_of_the_whole_image(
    libraries: dict[str, native.NativeLibrary],
) -> None:
    decoded = _sweep(libraries, 140, [], 0)
    assert all(
        bool(count) != (kind in LEFT_TO_OTHERS) for kind, count in decoded.items() if kind != "real"
    )
    assert sum(decoded.values()) >= 80 * len(libraries)


@pytest.mark.nightly
def test_10_000_random_crops_have_the_pixels_of_the_whole_image(
    libraries: dict[str, native.NativeLibrary], request: pytest.FixtureRequest
) -> None:
    images = []
    if Path(request.config.rootpath, "..", "shared", "data").exists():
        folder: Path = request.getfixturevalue("imagenet")
        images = [path.read_bytes() for path in sorted(folder.rglob("*.JPEG"))[:1000]]
    decoded = _sweep(libraries, 10_000, images, 1)
    print(f"identical crops: {sum(decoded.values()):,} ({decoded})")
    assert sum(decoded.values()) >= 10_000


def test_all_small_sizes_and_qualities(libraries: dict[str, native.NativeLibrary]) -> None:
    """1 to 40 pixels in both directions, qualities 1 to 100, each with every sampling."""
    generator = np.random.default_rng(2)
    for side in range(1, 41):
        for sampling in ("4:4:4", "4:2:2", "4:2:0"):
            other = int(generator.integers(1, 41))
            height, width = (side, other) if generator.random() < 0.5 else (other, side)
            noise = generator.integers(0, 256, (height, width, 3), np.uint8)
            memory = io.BytesIO()
            quality = int(generator.integers(1, 101))
            Image.fromarray(noise).save(memory, "JPEG", quality=quality, subsampling=sampling)
            image = memory.getvalue()
            expected = whole(image)
            assert expected.shape == (height, width, 3)
            for library in libraries.values():
                assert _compare(library, image, Box(0, 0, height, width, False), expected)


def test_extreme_coefficients_overflow_alike(libraries: dict[str, native.NativeLibrary]) -> None:
    """Quantisers of 255 bring 16-bit arithmetic to its limits."""
    generator = np.random.default_rng(3)
    for _ in range(30):
        image = bytearray(drawn(generator, "baseline", 60))
        at = 0
        while (at := image.find(b"\xff\xdb\x00\x43", at + 1)) >= 0:
            image[at + 5 : at + 69] = generator.choice([1, 128, 255], 64).astype(np.uint8).tobytes()
        expected = whole(bytes(image))
        box = Box(0, 0, expected.shape[0], expected.shape[1], False)
        for library in libraries.values():
            assert _compare(library, bytes(image), box, expected)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_the_same_with_and_without_it(
    kind: str, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(4)
    images = [drawn(generator, kind, 200) for _ in range(12)]
    decoder = Decoder(Crop(32, train), seed=1)
    uniforms = decoder.draw(0, np.arange(len(images)))

    def made() -> npt.NDArray[np.uint8]:
        out = np.empty((len(images), 32, 32, 3), np.uint8)
        for k, image in enumerate(images):
            decoder.decode(image, "x", uniforms[k], out[k])
        return out

    with_it = made()
    monkeypatch.setattr(native, "find", lambda: None)
    assert np.array_equal(with_it, made())


def test_damage_is_left_to_the_other_decoder(
    libraries: dict[str, native.NativeLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoded damage has the other decoder's pixels, and all of its errors are raised."""
    generator = np.random.default_rng(5)
    outcomes = {"same": 0, "refused": 0, "error": 0}
    for k in range(300):
        image = bytearray(drawn(generator, KINDS[k % 4], 120))
        for _ in range(int(generator.integers(1, 4))):
            at = int(generator.integers(0, len(image)))
            if generator.random() < 0.7:
                image[at] ^= 1 << int(generator.integers(0, 8))
            elif generator.random() < 0.5:
                del image[at : at + int(generator.integers(1, 9))]
            else:
                del image[max(at, 1) :]
        outcomes[outcome(bytes(image), generator)] += 1
    assert min(outcomes.values()) >= 10, outcomes


def outcome(image: bytes, generator: np.random.Generator) -> str:
    """Compare the decoders on a possibly damaged image. Used by tests/fuzz, too."""
    library = native.find() or (native.NativeLibrary() if os.path.exists(native.LIBRARY) else None)
    shape = None if library is None else library.shape(image)
    if library is None or shape is None:
        return "refused"
    if shape.height * shape.width > 1 << 22:
        return "refused"
    box = box_within(generator, shape.height, shape.width)
    made = library.crop(image, box.top, box.left, box.height, box.width)
    pixels = None
    if made is not None:
        pixels = made[0][:, box.left - made[1] :][:, : box.width].copy()
    find = native.find
    native.find = lambda: None
    try:
        size = decoder._jpeg_size(image, "x")
        assert size == shape[:2]
        other, top, left = decoder._decode_jpeg(image, "x", size, box, 1)
    except DecodeError:
        assert made is None, "damage was decoded without an error"
        return "error"
    finally:
        native.find = find
    if pixels is None:
        return "refused"
    part = other[box.top - top :, box.left - left :][: box.height, : box.width]
    assert np.array_equal(part, pixels)
    return "same"


def test_truncated_and_damaged_images_raise_the_same_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = np.random.default_rng(6).integers(0, 256, (90, 120, 3), np.uint8)
    memory = io.BytesIO()
    Image.fromarray(noise).save(memory, "JPEG", quality=90)
    image = memory.getvalue()
    damaged = [image[:length] for length in range(2, len(image), 997)]
    damaged.append(image[: len(image) // 2] + b"\xff\xda" + image[len(image) // 2 :])

    def errors() -> list[str]:
        raised = []
        for each in damaged:
            with pytest.raises(DecodeError) as error:
                decode_whole(each, "x")
            raised.append(str(error.value))
        return raised

    with_it = errors()
    monkeypatch.setattr(native, "find", lambda: None)
    assert with_it == errors()


def test_threads_do_not_disturb_each_other(libraries: dict[str, native.NativeLibrary]) -> None:
    generator = np.random.default_rng(7)
    images = [drawn(generator, KINDS[k % 4], 150) for k in range(24)]
    expected = [whole(image) for image in images]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                for image, pixels in zip(images, expected, strict=True):
                    box = Box(0, 0, pixels.shape[0], pixels.shape[1], False)
                    assert _compare(libraries["usual"], image, box, pixels)
        except BaseException as error:  # reported by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_crops_are_resized_to_opencvs_pixels(libraries: dict[str, native.NativeLibrary]) -> None:
    library, cv2 = libraries["usual"], decoder.opencv()
    generator = np.random.default_rng(9)
    for k in range(300):
        image = generator.integers(0, 256, (*generator.integers(1, 300, 2), 3), np.uint8)
        part = image[int(generator.integers(0, len(image))) :]
        rows, columns = (int(side) for side in generator.integers(1, 260, 2))
        if part.shape[0] >= 2 * rows and part.shape[1] >= 2 * columns:
            continue  # OpenCV averages areas.
        out = np.zeros((rows, columns, 3), np.uint8)
        flip, upend = bool(k & 1), bool(k & 2)
        assert library.resize(part, flip, upend, out)
        expected = cv2.resize(part, (columns, rows), interpolation=cv2.INTER_LINEAR)
        assert np.array_equal(out, expected[:: -1 if upend else 1, :: -1 if flip else 1])
    assert not library.resize(image[:, ::2], False, False, out)
    assert not library.resize(image, False, False, np.zeros((9, 8, 3), np.uint8)[:, ::2])


def test_a_library_that_resizes_otherwise_leaves_it_to_opencv(
    libraries: dict[str, native.NativeLibrary],
) -> None:
    cv2 = decoder.opencv()
    assert not native.resizes_alike(native.NativeLibrary(), lambda *a: cv2.resize(*a) ^ 1)
    assert native.resizes_alike(libraries["usual"], cv2.resize)


def test_a_library_with_other_pixels_is_not_used(
    libraries: dict[str, native.NativeLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = libraries["usual"]
    assert native.agrees(usual)

    def brighter(*box: int) -> object:
        made = usual.crop(*box)  # type: ignore[arg-type]
        return None if made is None else (made[0] + 1, made[1])

    wrong = native.NativeLibrary()
    monkeypatch.setattr(wrong, "crop", brighter)
    assert not native.agrees(wrong)


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [("switched off", "DLIO_NATIVE=0"), ("not built", "without a C compiler"), ("broken", "load")],
)
def test_without_it_the_reason_is_named(
    prepare: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "_load", functools.cache(native._load.__wrapped__))
    if prepare == "switched off":
        monkeypatch.setenv("DLIO_NATIVE", "0")
    else:
        library = tmp_path / "_jpeg.so"
        monkeypatch.setattr(native, "LIBRARY", str(library))
        if prepare == "broken":
            library.write_bytes(b"no library")
    assert native.find() is None
    assert native.name().startswith("libjpeg-turbo (")
    assert reason in native.name()
