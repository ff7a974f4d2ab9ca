"""A disk without room for more than a file has already."""

import errno
import os
from io import FileIO


class FullDisk(FileIO):
    """Takes a few bytes at a time, and none behind the end that the file had when it was opened."""

    def __init__(self, path, mode):
        self._room = os.path.getsize(path) if os.path.isfile(path) else 0
        super().__init__(path, mode)

    def write(self, data):
        room = self._room - self.tell()
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data[: min(room, 3)])
