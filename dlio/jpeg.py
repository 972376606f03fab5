"""JPEGs with a restart marker at the end of each row of blocks, of which single rows can be cut.

Huffman coding forces a decoder through everything above the rows that it is to give. A restart
marker sets it afresh: header, the rows that a crop needs, with the height changed and the markers
numbered anew, are a small JPEG that any decoder reads, to the same pixels. Baseline JPEGs with one
scan only; all functions are pure.
"""

import shutil
import subprocess
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.schema import Buffer

_TOOL: Final = "jpegtran"
_TOOL_TIMEOUT_S: Final = 60.0
_END: Final = b"\xff\xd9"


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
    scan_at: int
    """Where the coded rows begin."""

    @property
    def rows(self) -> int:
        return -(-self.height // self.block_height)

    @property
    def restarts_at_rows(self) -> bool:
        return self.restart_interval == self.blocks_a_row


def parse_frame(image: Buffer) -> Frame | None:
    """Read a JPEG's header; None for what is no baseline JPEG with a single scan."""
    view = memoryview(image)
    at, frame, interval = 2, 0, 0
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
            return _frame(view, frame, at, length, interval)
        at += 2 + length
    return None


def _frame(view: memoryview, frame: int, scan: int, length: int, interval: int) -> Frame | None:
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
        scan_at=scan + 2 + length,
    )


def row_starts(image: Buffer, frame: Frame) -> npt.NDArray[np.uint32] | None:
    """Where each row of blocks begins, and where the last one ends; shape (rows + 1,).

    None when the image does not restart at rows, or its markers are not as many.
    """
    if not frame.restarts_at_rows:
        return None
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


def cut_rows(
    image: Buffer, frame: Frame, starts: npt.NDArray[np.uint32], first: int, last: int
) -> bytes:
    """A JPEG of the rows of blocks `first` to `last` (not included) of one that restarts at rows.

    Its height is theirs; its pixels are those of the whole image, where upsampling does not look
    across rows of blocks (libjpeg-turbo's fast upsampling).
    """
    view = memoryview(image)
    height = min(last * frame.block_height, frame.height) - first * frame.block_height
    head = bytearray(view[: frame.scan_at])
    head[frame.height_at : frame.height_at + 2] = height.to_bytes(2, "big")
    begin = int(starts[first])
    body = bytearray(view[begin : int(starts[last]) - 2])
    for k in range(first + 1, last):
        body[int(starts[k]) - 1 - begin] = 0xD0 + ((k - first - 1) & 7)
    return b"".join((head, body, _END))


def with_restart_rows(image: Buffer) -> bytes | None:
    """The same JPEG, losslessly, restarting at rows; as it is if it does so already.

    None where that cannot be done: without `jpegtran`, or for other JPEGs than baseline ones.
    """
    frame = parse_frame(image)
    if frame is None:
        return None
    if row_starts(image, frame) is not None:
        return bytes(image)
    tool = shutil.which(_TOOL)
    if tool is None:
        return None
    try:
        done = subprocess.run(
            [tool, "-copy", "all", "-restart", "1"],
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
    return done.stdout
