"""Crops of many images, made together.

A thread that releases the interpreter's lock has to wait for it afterwards, behind all others, and
on many cores most waits wake a sleeping thread. So the crops of several images are made by one call
of dlio's own decoder, with the same pixels as one by one. Images that it does not know, or that are
decoded at a fraction of their size, are decoded one by one.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dlio.data.schema import Buffer
from dlio.errors import DecodeError
from dlio.image import native
from dlio.image.crop import CropRegion
from dlio.image.decoder import Decoder, check_size, opencv

_Pixels = npt.NDArray[np.uint8]


def decode_all(
    decoder: Decoder,
    images: Sequence[Buffer],
    names: Sequence[object],
    uniforms: Sequence[npt.NDArray[np.float64]],
    outs: Sequence[_Pixels],
) -> list[CropRegion | Exception | None]:
    """Do `decoder.decode` for several images; return its results, or errors in their places."""
    shown: list[CropRegion | Exception | None] = [None] * len(images)
    alone = list(range(len(images)))
    library = None if decoder.kept or decoder.crop.crops > 1 else _library()
    if library is not None:
        cuts: dict[int, native.NativeCrop] = {}
        alone = []
        for k, image in enumerate(images):
            try:
                cut = _cut(library, decoder, image, names[k], uniforms[k], outs[k])
            except DecodeError as error:
                shown[k] = error
                continue
            if cut is None:
                alone.append(k)
            else:
                cuts[k], shown[k] = cut
        alone += _refused(library, cuts)
    for k in alone:
        try:
            shown[k] = decoder.decode(images[k], names[k], uniforms[k], outs[k])
        except Exception as error:
            shown[k] = error
    return shown


def finish_all(
    decoder: Decoder,
    images: Sequence[_Pixels],
    uniforms: Sequence[npt.NDArray[np.float64]],
    outs: Sequence[_Pixels],
) -> None:
    """Do `decoder.finish` for several images."""
    crop = decoder.crop
    alone = list(range(len(images)))
    library = _library() if crop.train and crop.crops == 1 else None
    if library is not None:
        cuts: dict[int, native.NativeCrop] = {}
        alone = []
        for k, pixels in enumerate(images):
            box = crop.box(pixels.shape[0], pixels.shape[1], uniforms[k].tolist())
            if decoder.factor(box) > 1 or pixels.strides[1:] != (3, 1):
                alone.append(k)
                continue
            place = box.top, box.left, box.height, box.width
            cuts[k] = native.NativeCrop(pixels, None, *place, box.flip, box.upend, outs[k])
        alone += _refused(library, cuts)
    for k in alone:
        decoder.finish(images[k], uniforms[k], outs[k])


def _refused(library: native.NativeLibrary, cuts: dict[int, native.NativeCrop]) -> list[int]:
    """Make crops by one call; return the numbers of those that have to be made otherwise."""
    if not cuts:
        return []
    made = library.crops(list(cuts.values()))
    return [k for k, is_made in zip(cuts, made, strict=True) if not is_made]


def _library() -> native.NativeLibrary | None:
    """Return dlio's own decoder; None if it is not in use or does not resize as OpenCV does."""
    library = native.find()
    if library is None or not native.resizes_alike(library, opencv().resize):
        return None
    return library


def _cut(
    library: native.NativeLibrary,
    decoder: Decoder,
    image: Buffer,
    name: object,
    uniforms: npt.NDArray[np.float64],
    out: _Pixels,
) -> tuple[native.NativeCrop, CropRegion] | None:
    """Return the crop of a JPEG and the part that it shows; None if it is decoded another way.

    Raises DecodeError for more pixels than the limit.
    """
    shape = library.shape(image)
    if shape is None:
        return None
    check_size(shape.height, shape.width, name)
    box = decoder.crop.box(shape.height, shape.width, uniforms.tolist())
    if decoder.factor(box) > 1:
        return None
    place = box.top, box.left, box.height, box.width
    shown = CropRegion(box, shape.height, shape.width)
    data = np.frombuffer(image, np.uint8)
    return native.NativeCrop(data, shape, *place, box.flip, box.upend, out), shown
