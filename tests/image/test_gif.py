"""GIFs are decoded by their content, whatever their name: class folders have some named .jpg."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

import dlio
from dlio.image.decoder import decode_whole, image_size


def test_a_gif_named_jpg_has_the_pixels_that_pillow_gives(tmp_path: Path) -> None:
    memory = io.BytesIO()
    Image.new("RGB", (32, 24), (200, 30, 30)).save(memory, "GIF")
    expected = np.asarray(Image.open(memory).convert("RGB"))
    assert image_size(memory.getvalue(), "a") == (24, 32)
    np.testing.assert_array_equal(decode_whole(memory.getvalue(), "a"), expected)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat/0.jpg").write_bytes(memory.getvalue())
    with dlio.open(str(tmp_path), image_size=16, tiers="none") as data:
        assert tuple(data[0][0].shape) == (3, 16, 16)
