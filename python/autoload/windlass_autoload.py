"""Opens Windlass before anything opens NCCL, in Python programs that a launcher starts without LD_PRELOAD.

Asleep unless ``WINDLASS_PYTHON=on``. Python runs :func:`start` by ``windlass_autoload.start`` (3.15 and newer, PEP 829), older releases by
``windlass_autoload.pth``. A library that needs ``libnccl.so.2``, as PyTorch's does, then gets Windlass, which has that name.
"""

import os
import sys


_started = False


def start():
    """Opens Windlass if the user asks for it, and tells why if that has no effect. Never raises: the program must start as ever."""
    global _started
    asked = os.environ.get("WINDLASS_PYTHON")
    # Python may read the folder of packages twice, by two names.
    if _started or (asked or "off").lower() in ("off", "0", "no", "false"):
        return
    _started = True
    try:
        why = _open() if asked == "on" else "expected on or off, and off holds"
    except Exception as error:
        why = error
    if why and os.environ.get("WINDLASS_LOG") != "off":
        try:
            os.write(2, f"windlass: WINDLASS_PYTHON={asked} has no effect: {why}\n".encode(errors="replace"))
        except OSError:
            pass


def _open():
    """Opens it, or returns why not."""
    # It takes most of the time of this function.
    import ctypes

    try:
        # Whatever has this name already serves all who ask for it.
        nccl = ctypes.CDLL("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_LAZY)
        return None if hasattr(nccl, "windlassGetVersion") else "another NCCL is loaded already"
    except OSError:
        pass
    for folder in [os.path.dirname(__file__), *sys.path]:
        library = os.path.join(folder, "windlass", "lib", "windlass", "libwindlass.so")
        if os.path.exists(library):
            ctypes.CDLL(library)
            return None
    return "the package windlass is not installed for this Python"
