"""Rows that are cut out of a JPEG decode to the pixels that they have in the whole."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dlio.crop import Crop
from dlio.decode import Decoder, decode_whole
from dlio.encode import encode_with_restart_rows, resized
from dlio.errors import DecodeError
from dlio.jpeg import cut_rows, parse_frame, row_starts, with_kept_rows, with_restart_rows


def _jpeg(height: int, width: int, sampling: str, mode: str = "RGB", rows: bool = True) -> bytes:
    generator = np.random.default_rng(height * 1000 + width)
    small = generator.integers(0, 255, (height // 8 + 1, width // 8 + 1, 3), np.uint8)
    image = Image.fromarray(small).resize((width, height)).convert(mode)
    memory = io.BytesIO()
    options = {"restart_marker_rows": 1} if rows else {}
    subsampling = {} if mode == "L" else {"subsampling": sampling}
    image.save(memory, "JPEG", quality=85, **options, **subsampling)
    return memory.getvalue()


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 150),
    st.integers(1, 150),
    st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    st.sampled_from(["RGB", "L"]),
    st.data(),
)
def test_cut_rows_have_the_pixels_of_the_whole(
    height: int, width: int, sampling: str, mode: str, data: st.DataObject
) -> None:
    image = _jpeg(height, width, sampling, mode)
    frame = parse_frame(image)
    assert frame is not None
    assert (frame.height, frame.width) == (height, width)
    starts = row_starts(image, frame)
    assert starts is not None
    assert len(starts) == frame.rows + 1
    first = data.draw(st.integers(0, frame.rows - 1))
    last = data.draw(st.integers(first + 1, frame.rows))
    part = decode_whole(cut_rows(image, frame, starts, first, last), "part")
    whole = decode_whole(image, "whole")
    begin = first * frame.block_height
    assert np.array_equal(part, whole[begin : begin + len(part)])
    assert len(part) == min(last * frame.block_height, height) - begin


@pytest.mark.parametrize("sampling", ["4:4:4", "4:2:0"])
def test_a_crop_is_the_same_with_and_without_restart_rows(sampling: str) -> None:
    for size in (32, 224):
        decoder = Decoder(Crop(size, True), 0)
        uniforms = decoder.draw(0, np.arange(20))
        for k in range(20):
            plain, cut = np.empty((2, size, size, 3), np.uint8)
            decoder.decode(_jpeg(400, 500, sampling, rows=False), "a", uniforms[k], plain)
            decoder.decode(_jpeg(400, 500, sampling), "a", uniforms[k], cut)
            assert np.array_equal(plain, cut)


def test_real_pictures_keep_their_pixels(imagenet: Path) -> None:
    decoder = Decoder(Crop(224, True), 0)
    files = sorted(imagenet.rglob("*.JPEG"))[:30]
    uniforms = decoder.draw(0, np.arange(len(files)))
    for k, path in enumerate(files):
        pixels = resized(decode_whole(path.read_bytes(), str(path)), 256)
        assert min(pixels.shape[:2]) <= 256 or pixels.size
        image = encode_with_restart_rows(pixels, 90)
        frame = parse_frame(image)
        assert frame is not None
        assert frame.restarts_at_rows
        assert row_starts(image, frame) is not None
        out, again = np.empty((2, 224, 224, 3), np.uint8)
        decoder.decode(image, "a", uniforms[k], out)
        plain = Image.open(io.BytesIO(image))
        assert plain.size == (pixels.shape[1], pixels.shape[0])
        whole = decode_whole(image, "a")
        box = decoder.box(whole.shape[0], whole.shape[1], uniforms[k].tolist())
        if decoder._factor(box) == 1:
            from dlio.decode import opencv

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
        row_starts(image, frame)
    decoder = Decoder(Crop(32, True), 0)
    try:
        decoder.decode(
            bytes(image), "a", decoder.draw(0, np.arange(1))[0], np.empty((32, 32, 3), np.uint8)
        )
    except DecodeError:
        return


def test_restart_rows_are_added_losslessly_where_there_is_a_tool() -> None:
    image = _jpeg(100, 120, "4:2:0", rows=False)
    assert with_restart_rows(_jpeg(100, 120, "4:2:0")) == with_kept_rows(_jpeg(100, 120, "4:2:0"))
    assert with_restart_rows(b"no jpeg") is None
    made = with_restart_rows(image)
    if made is None:
        pytest.skip("jpegtran is not installed (Debian: libjpeg-turbo-progs)")
    assert np.array_equal(decode_whole(made, "a"), decode_whole(image, "b"))
    frame = parse_frame(made)
    assert frame is not None
    assert frame.rows_at


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200), st.integers(1, 200), st.sampled_from(["4:4:4", "4:2:0"]))
def test_where_rows_begin_is_kept_in_the_file(height: int, width: int, sampling: str) -> None:
    plain = _jpeg(height, width, sampling)
    image = with_kept_rows(plain)
    assert with_kept_rows(image) == image
    assert np.array_equal(decode_whole(image, "a"), decode_whole(plain, "b"))
    frame, unkept = parse_frame(image), parse_frame(plain)
    assert frame is not None
    assert unkept is not None
    assert frame.rows_at == unkept.scan_header_at
    starts, found = row_starts(image, frame), row_starts(plain, unkept)
    assert starts is not None
    assert found is not None
    assert np.array_equal(starts - frame.scan_at, found - unkept.scan_at)
    assert cut_rows(image, frame, starts, 0, 1) == cut_rows(plain, unkept, found, 0, 1)


@settings(deadline=None)
@given(st.data())
def test_where_rows_begin_is_not_believed_when_it_is_wrong(data: st.DataObject) -> None:
    image = bytearray(with_kept_rows(_jpeg(100, 80, "4:2:0")))
    frame = parse_frame(image)
    assert frame is not None
    right = row_starts(image, frame)
    assert right is not None
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(frame.rows_at + 14, frame.scan_header_at - 1))
        image[at] = data.draw(st.integers(0, 255))
    starts = row_starts(image, frame)
    assert starts is not None
    assert np.array_equal(starts, right)
