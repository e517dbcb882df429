"""Where the files of the package are."""

import os
from pathlib import Path

from ._error import Error

#: The package is laid out as an installation: bin, lib/windlass, lib/cmake, include.
_PREFIX = Path(__file__).resolve().parent


def library() -> str:
    """The path of the library, for ``LD_PRELOAD``, ``VLLM_NCCL_SO_PATH`` and the like."""
    return _existing("lib/windlass/libwindlass.so")


def include() -> str:
    """The folder of ``nccl.h`` and ``windlass.h``, for a C or C++ compiler's ``-I``."""
    return _existing("include/windlass")


def cmake() -> str:
    """The prefix for CMake's ``-DCMAKE_PREFIX_PATH``, so that ``find_package(Windlass)`` finds this package."""
    return os.path.dirname(os.path.dirname(os.path.dirname(_existing("lib/cmake/Windlass"))))


def command() -> str:
    """The path of the ``windlass`` program, made executable where whatever unpacked the package did not."""
    path = _existing("bin/windlass")
    if not os.access(path, os.X_OK):
        try:
            os.chmod(path, os.stat(path).st_mode | 0o111)
        except OSError as error:
            raise Error(f"{path} is not executable, and cannot be made so: {error.strerror}") from error
    return path


def _existing(name: str) -> str:
    path = _PREFIX / name
    if not path.exists():
        raise Error(f"{path} is missing: install the package anew (a checkout has it only once it is built as a wheel)")
    return str(path)
