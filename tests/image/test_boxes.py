"""Boxes of many images at a time are those of one image after another."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlio.image.crop import Crop, boxes_of

_CROPS = [
    Crop(224, True),
    Crop(32, True, scale=(0.9, 1.0), flip=0.0, upend=0.5),
    Crop(8, True, ratio=(0.1, 0.2), crops=3),
    Crop(64, False, resize=70),
    Crop(64, False, across=48),
]


@given(
    st.sampled_from(_CROPS),
    st.lists(st.tuples(st.integers(1, 600), st.integers(1, 600)), max_size=40),
    st.integers(0, 1 << 32),
)
def test_boxes_of_many_images_are_those_of_each(
    crop: Crop, sides: list[tuple[int, int]], seed: int
) -> None:
    uniforms = np.random.default_rng(seed).random((len(sides), crop.draws))
    heights, widths = np.array(sides, np.int64).reshape(-1, 2).T
    many = boxes_of(crop, heights, widths, uniforms)
    assert many.shape == (len(sides), crop.crops, 6)
    for k, (height, width) in enumerate(sides):
        each = crop.boxes(height, width, uniforms[k].tolist())
        assert many[k].tolist() == [
            [box.top, box.left, box.height, box.width, int(box.flip), int(box.upend)]
            for box in each
        ]
