"""Windlass, a drop-in for libnccl.so.2, as a Python package.

Programs need no line of it: ``windlass run -- python train.py`` is enough. From Python:

* :func:`enable` starts this process again over Windlass, or prepares the environment of the processes that it starts;
* :func:`stats` gives what was counted, in this process or in another one;
* :func:`library`, :func:`include` and :func:`cmake` say where the files of the package are.

``python -m windlass`` is the ``windlass`` command.
"""

from ._enable import enable
from ._error import Error
from ._files import cmake, include, library
from ._stats import Calls, Communicator, Stats, stats

__all__ = ["Calls", "Communicator", "Error", "Stats", "cmake", "enable", "include", "library", "stats"]

__version__: str


def __getattr__(name: str) -> str:
    # Asked for seldom, and the import takes as long as all else here.
    if name == "__version__":
        from importlib.metadata import version

        return version("windlass")
    raise AttributeError(f"module 'windlass' has no attribute {name!r}")
