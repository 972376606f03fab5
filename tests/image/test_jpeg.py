"""A part cut out of a JPEG decodes to the same pixels as in the whole image."""

import io
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dlio.errors import DecodeError
from dlio.image.crop import Crop
from dlio.image.decoder import Decoder, decode_whole, encode_with_restarts, resized
from dlio.image.jpeg import (
    IntervalRange,
    cut,
    good_interval,
    interval_starts,
    parse_frame,
    touched,
    with_kept_starts,
    with_restarts,
)
from tests.conftest import examples


def _jpeg(
    height: int, width: int, sampling: str, mode: str = "RGB", intervals: int | None = 1
) -> bytes:
    """With so many restart intervals in a row, where its blocks can be dealt out so."""
    generator = np.random.default_rng(height * 1000 + width)
    small = generator.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    image = Image.fromarray(small).resize((width, height)).convert(mode)
    memory = io.BytesIO()
    across = 16 if sampling != "4:4:4" and mode == "RGB" else 8
    blocks = -(-width // across)
    options = {}
    if intervals is not None:
        options = {
            "restart_marker_blocks": blocks // intervals if blocks % intervals == 0 else blocks
        }
    subsampling = {} if mode == "L" else {"subsampling": sampling}
    image.save(memory, "JPEG", quality=85, **options, **subsampling)
    return memory.getvalue()


@settings(deadline=None, max_examples=examples(60))
@given(
    st.integers(1, 150),
    st.integers(1, 250),
    st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    st.sampled_from(["RGB", "L"]),
    st.integers(1, 8),
    st.data(),
)
def test_what_is_cut_has_the_pixels_of_the_whole(
    height: int, width: int, sampling: str, mode: str, intervals: int, data: st.DataObject
) -> None:
    image = _jpeg(height, width, sampling, mode, intervals)
    frame = parse_frame(image)
    assert frame is not None
    assert (frame.height, frame.width) == (height, width)
    starts = interval_starts(image, frame)
    assert starts is not None
    assert len(starts) == frame.rows * frame.intervals_a_row + 1
    top = data.draw(st.integers(0, height - 1))
    left = data.draw(st.integers(0, width - 1))
    bottom = data.draw(st.integers(top + 1, height))
    right = data.draw(st.integers(left + 1, width))
    part = touched(frame, top, bottom, left, right)
    made, high, wide = cut(image, frame, starts, part)
    pixels, whole = decode_whole(made, "part"), decode_whole(image, "whole")
    assert pixels.shape == (high, wide, 3)
    above, before = part.top * frame.block_height, part.left * frame.interval_width
    assert above <= top
    assert before <= left
    expected = whole[above : above + high, before : before + wide]
    assert np.array_equal(pixels, expected)
    assert above + high >= bottom
    assert before + wide >= right


@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:0"])
@pytest.mark.parametrize("intervals", [1, 2, 7])
@pytest.mark.daily("1-4:2:0", "7-4:4:4")
def test_a_crop_is_the_same_with_and_without_restarts(sampling: str, intervals: int) -> None:
    width = 504 if sampling == "4:4:4" else 448
    for size in (32, 224):
        decoder = Decoder(Crop(size, True), 0)
        uniforms = decoder.draw(0, np.arange(20))
        for k in range(20):
            plain, cropped = np.empty((2, size, size, 3), np.uint8)
            whole = _jpeg(400, width, sampling, intervals=None)
            decoder.decode(whole, "a", uniforms[k], plain)
            parted = _jpeg(400, width, sampling, intervals=intervals)
            decoder.decode(parted, "a", uniforms[k], cropped)
            assert np.array_equal(plain, cropped)


def test_intervals_are_not_too_many() -> None:
    assert good_interval(500, 8) == 9  # 63 blocks: 7 intervals of 72 pixels.
    assert good_interval(256, 16) == 4  # 4 of 64.
    assert good_interval(496, 16) == 31  # A prime number of blocks.
    assert good_interval(3, 16) == 1


def test_real_pictures_keep_their_pixels(imagenet: Path) -> None:
    decoder = Decoder(Crop(224, True), 0)
    files = sorted(imagenet.rglob("*.JPEG"))[:30]
    uniforms = decoder.draw(0, np.arange(len(files)))
    for k, path in enumerate(files):
        pixels = resized(decode_whole(path.read_bytes(), str(path)), 256)
        assert min(pixels.shape[:2]) <= 256 or pixels.size
        image = encode_with_restarts(pixels, 90)
        frame = parse_frame(image)
        assert frame is not None
        assert frame.intervals_a_row
        assert interval_starts(image, frame) is not None
        out, again = np.empty((2, 224, 224, 3), np.uint8)
        decoder.decode(image, "a", uniforms[k], out)
        plain = Image.open(io.BytesIO(image))
        assert plain.size == (pixels.shape[1], pixels.shape[0])
        whole = decode_whole(image, "a")
        box = decoder.crop.box(whole.shape[0], whole.shape[1], uniforms[k].tolist())
        if decoder.factor(box) == 1:
            from dlio.image.decoder import opencv

            cv2 = opencv()
            part = whole[box.top : box.top + box.height, box.left : box.left + box.width]
            shrinks = min(box.height, box.width) >= 448
            cv2.resize(
                part,
                (224, 224),
                dst=again,
                interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR,
            )
            if box.flip:
                cv2.flip(again, 1, dst=again)
            assert np.array_equal(out, again)


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(0, 600))
def test_damaged_jpegs_are_refused_and_nothing_else(noise: bytes, at: int) -> None:
    image = bytearray(_jpeg(64, 64, "4:2:0"))
    image[at : at + len(noise)] = noise
    frame = parse_frame(image)
    if frame is not None:
        interval_starts(image, frame)
    decoder = Decoder(Crop(32, True), 0)
    try:
        decoder.decode(
            bytes(image), "a", decoder.draw(0, np.arange(1))[0], np.empty((32, 32, 3), np.uint8)
        )
    except DecodeError:
        return


def test_restart_rows_are_added_losslessly_where_there_is_a_tool() -> None:
    image = _jpeg(600, 128, "4:2:0", intervals=None)
    good = _jpeg(600, 128, "4:2:0", intervals=2)
    assert with_restarts(good) == with_kept_starts(good)
    assert with_restarts(b"no jpeg") is None
    made = with_restarts(image)
    if made is None:
        pytest.skip("jpegtran is not installed (Debian: libjpeg-turbo-progs)")
    assert np.array_equal(decode_whole(made, "a"), decode_whole(image, "b"))
    frame = parse_frame(made)
    assert frame is not None
    assert frame.starts_at
    assert frame.intervals_a_row == 2


def test_small_pictures_keep_their_huffman_tables() -> None:
    """Own ones would take longer than the rows that restarts spare."""
    assert with_restarts(_jpeg(100, 128, "4:2:0", intervals=None)) is None
    few = _jpeg(100, 128, "4:2:0", intervals=1)
    assert with_restarts(few) == with_kept_starts(few) != few
    pixels = np.random.default_rng(0).integers(0, 256, (300, 256, 3), np.uint8)
    tables = []
    for part in (pixels, pixels[:200]):
        image = encode_with_restarts(part, 90)
        frame = parse_frame(image)
        assert frame is not None
        assert (interval_starts(image, frame) is not None) == (part is pixels)
        tables.append(len(image[: frame.scan_at]))
    standard = cv2.imencode(".jpg", pixels[:200])[1].tobytes()
    plain = parse_frame(standard)
    assert plain is not None
    assert tables[1] == plain.scan_at


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from(["4:4:4", "4:2:0"]))
def test_where_rows_begin_is_kept_in_the_file(height: int, width: int, sampling: str) -> None:
    plain = _jpeg(height, width, sampling, intervals=height % 4 + 1)
    image = with_kept_starts(plain)
    first = IntervalRange(0, 1, 0, 1)
    assert with_kept_starts(image) == image
    assert np.array_equal(decode_whole(image, "a"), decode_whole(plain, "b"))
    frame, unkept = parse_frame(image), parse_frame(plain)
    assert frame is not None
    assert unkept is not None
    assert frame.starts_at == unkept.scan_header_at
    starts, results = interval_starts(image, frame), interval_starts(plain, unkept)
    assert starts is not None
    assert results is not None
    assert np.array_equal(starts - frame.scan_at, results - unkept.scan_at)
    assert cut(image, frame, starts, first) == cut(plain, unkept, results, first)


@settings(deadline=None)
@given(st.data())
def test_where_rows_begin_is_not_believed_when_it_is_wrong(data: st.DataObject) -> None:
    image = bytearray(with_kept_starts(_jpeg(100, 96, "4:2:0", intervals=3)))
    frame = parse_frame(image)
    assert frame is not None
    right = interval_starts(image, frame)
    assert right is not None
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(frame.starts_at + 14, frame.scan_header_at - 1))
        image[at] = data.draw(st.integers(0, 255))
    starts = interval_starts(image, frame)
    assert starts is not None
    assert np.array_equal(starts, right)
