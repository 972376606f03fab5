"""JPEGs with a restart marker at the end of each row of blocks, of which single rows can be cut.

Huffman coding forces a decoder through everything above the rows that it is to give. A restart
marker sets it afresh: header, the rows that a crop needs, with the height changed and the markers
numbered anew, are a small JPEG that any decoder reads, to the same pixels. Baseline JPEGs with one
scan only.

Where the rows begin is kept in the file itself, in a segment that decoders skip, so that it stays
beside the sample in every container: marker APP9, its length (2 bytes, big-endian), `dlio-rows`,
the bytes of a number (2 or 4), and each row's length with its marker, little-endian, as the last
segment before the scan. It is believed only where the markers are found in their places.
"""

import itertools
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.schema import Buffer

_TOOL: Final = "jpegtran"
_TOOL_TIMEOUT_S: Final = 60.0
_END: Final = b"\xff\xd9"
_APP9: Final = 0xE9
_NAME: Final = b"dlio-rows"
_MAX_SEGMENT: Final = 0xFFFF


@dataclass(frozen=True, slots=True)
class Frame:
    """What the header of a baseline JPEG with one scan says."""

    height: int
    width: int
    height_at: int
    """Of the height's two bytes."""
    block_height: int
    """Rows of pixels in a row of blocks (MCUs)."""
    blocks_a_row: int
    restart_interval: int
    """Blocks between restart markers; 0 without."""
    scan_header_at: int
    scan_at: int
    """Where the coded rows begin."""
    rows_at: int = 0
    """Of the segment that tells where rows begin, which ends at `scan_header_at`; 0 without."""

    @property
    def rows(self) -> int:
        return -(-self.height // self.block_height)

    @property
    def restarts_at_rows(self) -> bool:
        return self.restart_interval == self.blocks_a_row


def parse_frame(image: Buffer) -> Frame | None:
    """Read a JPEG's header; None for what is no baseline JPEG with a single scan."""
    view = memoryview(image)
    at, frame, interval, rows_at = 2, 0, 0, 0
    if bytes(view[:2]) != b"\xff\xd8":
        return None
    while at + 4 <= len(view) and view[at] == 0xFF:
        marker, length = view[at + 1], view[at + 2] << 8 | view[at + 3]
        if length < 2 or at + 2 + length > len(view):
            return None
        if marker in (0xC0, 0xC1):
            frame = at
        elif 0xC2 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return None
        elif marker == 0xDD and length >= 4:
            interval = view[at + 4] << 8 | view[at + 5]
        elif marker == 0xDA:
            return _frame(view, frame, at, length, interval, rows_at)
        is_rows = marker == _APP9 and bytes(view[at + 4 : at + 4 + len(_NAME)]) == _NAME
        rows_at = at if is_rows and length > 3 + len(_NAME) else 0
        at += 2 + length
    return None


def _frame(
    view: memoryview, frame: int, scan: int, length: int, interval: int, rows_at: int
) -> Frame | None:
    components = view[frame + 9] if frame else 0
    if not components or frame + 10 + 3 * components > len(view) or view[scan + 4] != components:
        return None
    sampling = [view[frame + 11 + 3 * k] for k in range(components)]
    high, wide = max(s & 15 for s in sampling), max(s >> 4 for s in sampling)
    if components == 1:
        high = wide = 1  # A scan of one component is not interleaved: its blocks are 8 x 8.
    height, width = view[frame + 5] << 8 | view[frame + 6], view[frame + 7] << 8 | view[frame + 8]
    if not (high and wide and height and width):
        return None
    return Frame(
        height=height,
        width=width,
        height_at=frame + 5,
        block_height=8 * high,
        blocks_a_row=-(-width // (8 * wide)),
        restart_interval=interval,
        scan_header_at=scan,
        scan_at=scan + 2 + length,
        rows_at=rows_at,
    )


def row_starts(image: Buffer, frame: Frame) -> npt.NDArray[np.uint32] | None:
    """Where each row of blocks begins, and where the last one ends; shape (rows + 1,).

    None when the image does not restart at rows, or its markers are not as many.
    """
    if not frame.restarts_at_rows:
        return None
    if frame.rows_at:
        kept = _kept_starts(image, frame)
        if kept is not None:
            return kept
    data = np.frombuffer(image, np.uint8)
    marks = np.flatnonzero(data[frame.scan_at : -1] == 0xFF) + frame.scan_at
    kinds = data[marks + 1]
    restarts = marks[(kinds >= 0xD0) & (kinds <= 0xD7)]
    ends = marks[kinds == 0xD9]
    if len(restarts) != frame.rows - 1 or not len(ends):
        return None
    if not np.array_equal(data[restarts + 1] & 7, np.arange(len(restarts)) & 7):
        return None
    starts = np.concatenate([[frame.scan_at], restarts + 2, [int(ends[0]) + 2]])
    return starts.astype(np.uint32)


def _kept_starts(image: Buffer, frame: Frame) -> npt.NDArray[np.uint32] | None:
    """What the segment says; None where it is not true of this image."""
    view = memoryview(image)
    at = frame.rows_at + 4 + len(_NAME)
    letter = {2: "H", 4: "I"}.get(view[at])
    if letter is None or frame.scan_header_at - at - 1 != view[at] * frame.rows:
        return None
    lengths = struct.unpack_from(f"<{frame.rows}{letter}", view, at + 1)
    starts = list(itertools.accumulate(lengths, initial=frame.scan_at))
    if starts[-1] > len(view) or min(lengths) < 2:
        return None
    for k, end in enumerate(starts[1:]):
        mark = 0xD9 if k == frame.rows - 1 else 0xD0 + (k & 7)
        if view[end - 1] != mark or view[end - 2] != 0xFF:
            return None
    return np.array(starts, np.uint32)


def with_kept_rows(image: Buffer) -> bytes:
    """A JPEG that restarts at rows, with the segment that tells where they begin; any other image
    as it is."""
    frame = parse_frame(image)
    starts = row_starts(image, frame) if frame is not None else None
    if frame is None or starts is None:
        return bytes(image)
    lengths = np.diff(starts.astype(np.int64))
    width = 2 if int(lengths.max()) < 1 << 16 else 4
    length = 3 + len(_NAME) + width * len(lengths)
    if length > _MAX_SEGMENT:
        return bytes(image)
    segment = b"".join(
        [
            *(b"\xff", bytes([_APP9]), length.to_bytes(2, "big"), _NAME, bytes([width])),
            lengths.astype(f"<u{width}").tobytes(),
        ]
    )
    view = memoryview(image)
    return b"".join(
        [view[: frame.rows_at or frame.scan_header_at], segment, view[frame.scan_header_at :]]
    )


def cut_rows(
    image: Buffer,
    frame: Frame,
    starts: npt.NDArray[np.uint32],
    first: int,
    last: int,
    into: Callable[[int], memoryview] | None = None,
) -> bytearray | memoryview:
    """A JPEG of the rows of blocks `first` to `last` (not included) of one that restarts at rows.

    Its height is theirs; its pixels are those of the whole image, where upsampling does not look
    across rows of blocks (libjpeg-turbo's fast upsampling).

    Args:
        into: gives memory of a size for it; fresh memory otherwise.
    """
    view = memoryview(image)
    height = min(last * frame.block_height, frame.height) - first * frame.block_height
    head = frame.rows_at or frame.scan_header_at
    begin, end = int(starts[first]), int(starts[last]) - 2
    table = frame.scan_at - frame.scan_header_at
    size = head + table + end - begin + 2
    made = (into or bytearray)(size)
    made[:head] = view[:head]
    made[head : head + table] = view[frame.scan_header_at : frame.scan_at]
    made[head + table : size - 2] = view[begin:end]
    made[size - 2 : size] = _END
    made[frame.height_at : frame.height_at + 2] = height.to_bytes(2, "big")
    shift = head + table - begin - 1
    for k, at in enumerate(starts[first + 1 : last].tolist()):
        made[at + shift] = 0xD0 + (k & 7)
    return made


def with_restart_rows(image: Buffer) -> bytes | None:
    """The same pixels as a JPEG that restarts at rows and says where they begin.

    None where that cannot be done: without `jpegtran`, or for other JPEGs than baseline ones.
    """
    frame = parse_frame(image)
    if frame is None:
        return None
    if row_starts(image, frame) is not None:
        return with_kept_rows(image)
    tool = shutil.which(_TOOL)
    if tool is None:
        return None
    try:
        done = subprocess.run(
            # Without -optimize it would write the standard's Huffman tables: 6 % larger.
            [tool, "-copy", "all", "-optimize", "-restart", "1"],
            input=bytes(image),
            capture_output=True,
            timeout=_TOOL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    made = parse_frame(done.stdout) if done.returncode == 0 else None
    if made is None or row_starts(done.stdout, made) is None:
        return None
    return with_kept_rows(done.stdout)
