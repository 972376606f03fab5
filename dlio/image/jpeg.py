"""JPEGs with restart markers, out of which parts can be cut without decoding.

Huffman coding forces a decoder through all data before the pixels that it needs. A restart marker
resets the decoder. If each row of blocks (MCUs) is a whole number of restart intervals, a small
JPEG can be made of the header and of the intervals that a crop touches, with height and width
changed and the markers renumbered modulo 8. Any decoder reads it to the same pixels. This works for
baseline JPEGs with one scan.

The offsets of the intervals are stored in the file itself, in a segment that decoders skip, so that
they stay with the sample in every container. It is the last segment before the scan: marker APP9,
its length (2 bytes, big-endian), `dlio-rows`, the bytes of a number (2 or 4), and each interval's
length including its marker, little-endian. It is used only if the markers are at these offsets.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dlio.data.schema import Buffer

_TOOL: Final = "jpegtran"
_TOOL_TIMEOUT_S: Final = 60.0
_END: Final = b"\xff\xd9"
_SCAN: Final = b"\xff\xda"
_MARKER: Final = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]", re.DOTALL)
"""In coded data, any but a restart's; a byte of 255 is followed by zero there."""
_BARE: Final = (0x01, 0xD8)
"""Markers without a length, besides those of restarts and of the end."""
_APP9: Final = 0xE9
_LEAST_PIXELS: Final = 1 << 16
_MAX_SEGMENT: Final = 0xFFFF
_BEFORE: Final = np.array([2, 1])
_MARKS: Final = np.full((_MAX_SEGMENT, 2), 0xFF, np.uint8)
"""The restart marker behind each interval, in order."""
_MARKS[:, 1] = 0xD0 + (np.arange(_MAX_SEGMENT) & 7)
_NAME: Final = b"dlio-rows"
_MOST_INTERVALS_A_ROW: Final = 8
_NARROWEST: Final = 64
"""Least width of a restart interval, in pixels. Each interval costs about five bytes."""


@dataclass(frozen=True, slots=True)
class JpegFrame:
    """The header of a baseline JPEG with one scan. Offsets are in bytes from the file's start."""

    height: int
    width: int
    height_at: int
    """Offset of the height's two bytes."""
    block_height: int
    """Rows of pixels in a row of blocks (MCUs)."""
    block_width: int
    blocks_a_row: int
    restart_interval: int
    """Blocks between restart markers; 0 without."""
    scan_header_at: int
    scan_at: int
    """Offset of the coded rows."""
    starts_at: int = 0
    """Offset of the segment with the intervals' offsets, which ends at `scan_header_at`; or 0."""
    units: int = 1
    """Coded units of 8 x 8 values in a block, of all components."""

    @property
    def rows(self) -> int:
        return -(-self.height // self.block_height)

    @property
    def intervals_a_row(self) -> int:
        """Restart intervals in a row of blocks; 0 if rows do not begin with one."""
        interval = self.restart_interval
        return 0 if not interval or self.blocks_a_row % interval else self.blocks_a_row // interval

    @property
    def interval_width(self) -> int:
        """Width of a restart interval, in pixels."""
        return self.restart_interval * self.block_width


@dataclass(frozen=True, slots=True)
class IntervalRange:
    """A part of an image: its restart intervals from `top` to `bottom` and `left` to `right`."""

    top: int
    bottom: int
    left: int
    right: int


def parse_frame(image: Buffer) -> JpegFrame | None:
    """Read a JPEG's header; None for everything but a baseline JPEG with a single scan."""
    view = memoryview(image)
    at, frame, interval, starts_at = 2, 0, 0, 0
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
            return _frame(view, frame, at, length, interval, starts_at)
        is_rows = marker == _APP9 and bytes(view[at + 4 : at + 4 + len(_NAME)]) == _NAME
        starts_at = at if is_rows and length > 3 + len(_NAME) else 0
        at += 2 + length
    return None


def _frame(
    view: memoryview, frame: int, scan: int, length: int, interval: int, starts_at: int
) -> JpegFrame | None:
    held = view[frame + 2] << 8 | view[frame + 3] if frame else 0
    components = view[frame + 9] if held >= 8 else 0
    if not components or held < 8 + 3 * components or length < 3 or view[scan + 4] != components:
        return None
    sampling = [view[frame + 11 + 3 * k] for k in range(components)]
    high, wide = max(s & 15 for s in sampling), max(s >> 4 for s in sampling)
    if components == 1:
        high = wide = 1  # A scan of one component is not interleaved: its blocks are 8 x 8.
        sampling = [1 << 4 | 1]
    height, width = view[frame + 5] << 8 | view[frame + 6], view[frame + 7] << 8 | view[frame + 8]
    if not (high and wide and height and width):
        return None
    return JpegFrame(
        height=height,
        width=width,
        height_at=frame + 5,
        block_height=8 * high,
        block_width=8 * wide,
        blocks_a_row=-(-width // (8 * wide)),
        restart_interval=interval,
        scan_header_at=scan,
        scan_at=scan + 2 + length,
        starts_at=starts_at,
        units=sum((s & 15) * (s >> 4) for s in sampling),
    )


def good_interval(width: int, block_width: int) -> int:
    """Choose the blocks per restart interval for an image of this width that will be cropped."""
    blocks = -(-width // block_width)
    most = max(1, min(_MOST_INTERVALS_A_ROW, width // _NARROWEST))
    return blocks // max(k for k in range(1, most + 1) if blocks % k == 0)


def interval_starts(image: Buffer, frame: JpegFrame) -> npt.NDArray[np.int64] | None:
    """Return the offset of each restart interval, then the last one's end; (intervals + 1,).

    None if rows of blocks do not begin with an interval, or if markers are missing.
    """
    count = frame.rows * frame.intervals_a_row
    if not count:
        return None
    if frame.starts_at:
        kept = _kept_starts(image, frame, count)
        if kept is not None:
            return kept
    data = np.frombuffer(image, np.uint8)
    marks = np.flatnonzero(data[frame.scan_at : -1] == 0xFF) + frame.scan_at
    kinds = data[marks + 1]
    is_marker = (kinds != 0) & (kinds != 0xFF)
    marks, kinds = marks[is_marker], kinds[is_marker]
    is_restart = (kinds >= 0xD0) & (kinds <= 0xD7)
    restarts, ends = marks[is_restart], marks[kinds == 0xD9]
    # Only decoding the whole tells the effect of another marker among them.
    if len(restarts) != count - 1 or not is_restart[: count - 1].all() or not len(ends):
        return None
    if marks[count - 1] != ends[0]:
        return None
    if not np.array_equal(data[restarts + 1] & 7, np.arange(len(restarts)) & 7):
        return None
    return np.concatenate([[frame.scan_at], restarts + 2, [int(ends[0]) + 2]])


def ends(image: Buffer) -> bool:
    """True if a JPEG has its end behind the header of its first scan: one before may be the
    end of its thumbnail."""
    data, at = bytes(image), 2
    while (mark := _MARKER.search(data, at)) is not None and mark[0] != _END:
        at = mark.end()
        if data[at - 1] not in _BARE:
            at += int.from_bytes(data[at : at + 2], "big")
        if mark[0] == _SCAN:
            return data.find(_END, at) >= 0
    return mark is not None


def ends_after(image: Buffer, frame: JpegFrame) -> bool:
    """True if the first marker in the coded data is that of the end."""
    mark = _MARKER.search(bytes(image), frame.scan_at)
    return mark is not None and mark[0] == _END


def without_markers(
    image: Buffer, frame: JpegFrame, starts: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Return a copy whose coded data have no markers but those at the ends of `starts`, which is
    the result of `interval_starts`: others are damage, and become data."""
    data = np.array(np.frombuffer(image, np.uint8))
    marks = np.flatnonzero(data[frame.scan_at : int(starts[-1]) - 1] == 0xFF) + frame.scan_at
    kinds = data[marks + 1]
    wrong = marks[(kinds != 0) & (kinds != 0xFF) & ~np.isin(marks + 2, starts[1:])]
    data[wrong + 1] = 0
    return data


def _kept_starts(image: Buffer, frame: JpegFrame, count: int) -> npt.NDArray[np.int64] | None:
    """The offsets in the segment; None if the markers are elsewhere in this image."""
    data = np.frombuffer(image, np.uint8)
    at = frame.starts_at + 4 + len(_NAME)
    width = int(data[at])
    if width not in (2, 4) or frame.scan_header_at - at - 1 != width * count:
        return None
    starts = np.empty(count + 1, np.int64)
    starts[0] = frame.scan_at
    starts[1:] = np.frombuffer(image, f"<u{width}", count, at + 1)
    starts.cumsum(out=starts)
    if int(starts[-1]) > len(data) or int(starts[1]) < frame.scan_at + 2:
        return None
    marks = data[starts[1:, None] - _BEFORE]
    if image[int(starts[-1]) - 1] != _END[1]:
        return None
    marks[-1, 1] = _MARKS[count - 1, 1]
    return starts if (marks == _MARKS[:count]).all() else None


def with_kept_starts(image: Buffer) -> bytes:
    """Return a JPEG with the segment of its intervals' offsets added; any other image, or a JPEG
    whose rows do not begin with restart intervals, is returned unchanged."""
    frame = parse_frame(image)
    starts = interval_starts(image, frame) if frame is not None else None
    if frame is None or starts is None:
        return bytes(image)
    lengths = np.diff(starts)
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
        [view[: frame.starts_at or frame.scan_header_at], segment, view[frame.scan_header_at :]]
    )


def touched(frame: JpegFrame, top: int, bottom: int, left: int, right: int) -> IntervalRange:
    """Return the intervals that contain pixels of these rows and columns."""
    high, wide = frame.block_height, frame.interval_width
    return IntervalRange(top // high, -(-bottom // high), left // wide, -(-right // wide))


def cut(
    image: Buffer,
    frame: JpegFrame,
    starts: npt.NDArray[np.int64],
    part: IntervalRange,
    into: Callable[[int], memoryview] | None = None,
) -> tuple[bytearray | memoryview, int, int]:
    """Make a JPEG of some restart intervals of another: (the JPEG, its height, its width).

    Its pixels equal those of the whole image if upsampling does not cross blocks (libjpeg-turbo's
    fast upsampling).

    `starts` is the result of `interval_starts`; `into` returns memory of a size in bytes for the
    JPEG, which is fresh memory otherwise.
    """
    view = memoryview(image)
    height = min(part.bottom * frame.block_height, frame.height) - part.top * frame.block_height
    width = min(part.right * frame.interval_width, frame.width) - part.left * frame.interval_width
    across = frame.intervals_a_row
    # Ends of the restart intervals, by row and column; the bytes of a row are contiguous.
    ends = starts[1:].reshape(-1, across)[part.top : part.bottom, part.left : part.right]
    begins = starts[part.top * across + part.left : part.bottom * across : across]
    head = frame.starts_at or frame.scan_header_at
    body = head + frame.scan_at - frame.scan_header_at
    shift = (ends[:, -1] - begins).cumsum()
    size = body + int(shift[-1])
    shift += body - ends[:, -1]  # Distance that a row's bytes are moved.
    made = (into or bytearray)(size)
    made[:head] = view[:head]
    made[head:body] = view[frame.scan_header_at : frame.scan_at]
    if part.right - part.left == across:
        made[body:size] = view[int(begins[0]) : int(ends[-1, -1])]
    else:
        for begin, end, by in zip(
            begins.tolist(), ends[:, -1].tolist(), shift.tolist(), strict=True
        ):
            made[begin + by : end + by] = view[begin:end]
    marks = (ends + (shift - 1)[:, None]).reshape(-1)
    pattern = _MARKS[:, 1] if len(marks) < _MAX_SEGMENT else np.resize(_MARKS[:8, 1], len(marks))
    np.frombuffer(made, np.uint8)[marks] = pattern[: len(marks)]
    made[size - 2 : size] = _END
    made[frame.height_at : frame.height_at + 4] = (height << 16 | width).to_bytes(4, "big")
    return made, height, width


def gains_by_restarts(height: int, width: int) -> bool:
    """True if crops of a picture are made faster with restart intervals.

    They take Huffman tables of the picture's own: to prepare these costs as much as decoding 4,000
    pixels, and crops of 64 x 64 pixels come half as fast, those of 96 x 128 three quarters as fast.
    """
    return height * width >= _LEAST_PIXELS


def with_restarts(image: Buffer) -> bytes | None:
    """Return the same pixels as a JPEG whose rows are restart intervals, with their offsets.

    None if that cannot be done: without `jpegtran`, or for JPEGs that are not baseline; or is of no
    use, see `gains_by_restarts`.
    """
    frame = parse_frame(image)
    if frame is None:
        return None
    interval = good_interval(frame.width, frame.block_width)
    tool = shutil.which(_TOOL) if gains_by_restarts(frame.height, frame.width) else None
    has_some = interval_starts(image, frame) is not None
    if frame.restart_interval == interval or tool is None:
        return with_kept_starts(image) if has_some else None
    try:
        done = subprocess.run(
            # Without -optimize it would write the standard's Huffman tables: 6 % larger.
            [tool, "-copy", "all", "-optimize", "-restart", f"{interval}B"],
            input=bytes(image),
            capture_output=True,
            timeout=_TOOL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    made = parse_frame(done.stdout) if done.returncode == 0 else None
    if made is None or interval_starts(done.stdout, made) is None:
        return None
    return with_kept_starts(done.stdout)
