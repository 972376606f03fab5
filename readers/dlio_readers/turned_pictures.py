"""Pictures that EXIF says are turned, of which dlio returns the stored pixels."""

from dlio.data.schema import Buffer
from dlio.image.file_headers import exif_orientation
from dlio.util.printable import log_warning


class TurnedPictures:
    """Finds a data set's pictures that are turned, and tells the first one."""

    def __init__(self) -> None:
        self._told = False

    def of(self, picture: Buffer, path: str, doing: str) -> int:
        """Return the orientation that EXIF gives a picture; 1 for none. `doing` says how dlio takes
        the annotations of such pictures."""
        turn = exif_orientation(picture)
        if turn != 1 and not self._told:
            self._told = True
            log_warning(
                "%s is turned by EXIF: dlio returns the stored pixels of such pictures, and %s to "
                "be of these",
                path,
                doing,
            )
        return turn
