"""Which NCCL this process has loaded: none, the real one, or Windlass."""

import ctypes
import os
from typing import Iterator, NamedTuple, Optional

_NAME = "libnccl.so"


class Loaded(NamedTuple):
    """A loaded library that answers NCCL's calls."""

    path: str
    handle: Optional[ctypes.CDLL]

    @property
    def is_windlass(self) -> bool:
        """Whether it is Windlass."""
        return hasattr(self.handle, "windlassGetVersion")


def loaded() -> Optional[Loaded]:
    """The library that calls of NCCL reach, if there is one yet."""
    # Any file that calls itself NCCL is found by that name; of several, the first one loaded.
    handle = _open_loaded(f"{_NAME}.2")
    paths = list(_mapped())
    if handle is not None:
        path = _path(handle) or next(iter(paths), f"{_NAME}.2")
        return Loaded(path, handle)
    return Loaded(paths[0], _open_loaded(paths[0])) if paths else None


def _open_loaded(name: str) -> Optional[ctypes.CDLL]:
    """A library, only if it is loaded already."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
    except OSError:
        return None


class _LinkMap(ctypes.Structure):
    """The public beginning of the loader's ``struct link_map``."""

    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]


def _path(handle: ctypes.CDLL) -> Optional[str]:
    """The file of a library."""
    request_link_map = 2
    found = ctypes.POINTER(_LinkMap)()
    try:
        dlinfo = ctypes.CDLL(None).dlinfo
    except AttributeError:
        return None
    if dlinfo(ctypes.c_void_p(handle._handle), request_link_map, ctypes.byref(found)) != 0 or not found:
        return None
    return os.fsdecode(found.contents.name) or None


def _mapped() -> Iterator[str]:
    """Files under NCCL's name that are mapped into this process."""
    seen = set()
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            path = fields[5] if len(fields) == 6 else ""
            name = os.path.basename(path)
            if (name == _NAME or name.startswith(f"{_NAME}.")) and path not in seen:
                seen.add(path)
                yield path
