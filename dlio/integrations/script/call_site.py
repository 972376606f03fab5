"""The place in the script of calls of one kind, such as `backward`, which come again and again."""

import os
import sys
from types import CodeType, FrameType

from dlio.integrations.script.script_lines import foreign_frames

_NOWHERE = ("", 0, "the end of the script")


class CallSite:
    """Where the script has made its latest call of a kind.

    Walks the stack for each line of the script once, and looks then at a single frame as long as
    that is at the same depth: to ask each frame for its file takes longer than all else that is
    noted of a call.
    """

    __slots__ = ("_code", "_depth", "_is_direct", "_known", "place")

    def __init__(self) -> None:
        self.place: tuple[str, int, str] = _NOWHERE
        """File, line, and both as text."""
        self._depth = 0
        """Number of the script's frame, from that of `look` on."""
        self._code: CodeType | None = None
        """The script's code there."""
        self._known: dict[int, tuple[tuple[str, int, str], bool]] = {}
        """By its instruction, the place, and True if no code but torch's and dlio's stands between
        the script and the call."""
        self._is_direct = False

    def look(self) -> None:
        """Look where the function that calls this was called."""
        try:
            frame = sys._getframe(self._depth)
        except ValueError:
            frame = sys._getframe()
        if frame.f_code is self._code:
            known = self._known.get(frame.f_lasti)
            if known is not None:
                self.place, self._is_direct = known
                return
        self._search()

    def _search(self) -> None:
        frames, script = foreign_frames()
        if script is None:
            self._code, self._is_direct, self.place = None, False, _NOWHERE
            return
        depth, frame = 0, sys._getframe(1)
        while frame is not script:
            assert frame.f_back is not None
            depth, frame = depth + 1, frame.f_back
        if script.f_code is not self._code or depth != self._depth:
            self._known.clear()
        self._depth, self._code = depth, script.f_code
        file, line = script.f_code.co_filename, script.f_lineno
        self.place, self._is_direct = (
            (file, line, f"{os.path.basename(file)}:{line}"),
            len(frames) == 1,
        )
        self._known[script.f_lasti] = self.place, self._is_direct

    def frames(self) -> list[FrameType]:
        """Return the frames of frameworks and of the user that are running, from the innermost one
        to the script's, to the caller of the function that has called `look`."""
        return [sys._getframe(self._depth - 1)] if self._is_direct else foreign_frames()[0]
