"""What Windlass counted, as dictionaries."""

import ctypes
import json
import os
import subprocess
import tempfile
from typing import Any, Dict, List, Optional, TypedDict, cast

from ._error import Error
from ._files import command
from ._loaded import loaded


class _Counted(TypedDict):
    """What every row of calls has."""

    #: NCCL's name of the function.
    function: str
    #: Who ran them: ``forward`` and ``registered`` NCCL, ``p2p`` and ``native`` Windlass.
    path: str
    calls: int
    #: Bytes of the larger buffer of each call, as nccl-tests counts.
    bytes: int


class Calls(_Counted, total=False):
    """Calls of one function on one path."""

    #: On the path ``forward``: native collectives take this function's calls below this many bytes; absent if they take none.
    native_below: int


class Communicator(TypedDict, total=False):
    """What one communicator did."""

    #: Its number in the process, from 1; 0 stands for unknown handles and for old, ended ones.
    serial: int
    #: ``live`` or ``ended``.
    state: str
    #: The process's rank, -1 if unknown.
    rank: int
    #: How many ranks, 0 if unknown.
    ranks: int
    #: The CUDA device, -1 if unknown.
    device: int
    #: ``yes``, or why it has no peer group; absent where none was asked for.
    peer_group: str
    #: Of a lazy one: ``unbuilt``, ``built`` or ``reused``; absent where NCCL made it at its init.
    nccl: str
    #: Of one with a peer group: what it lacks, and why.
    lacks: Dict[str, str]
    #: Of one with native collectives: where the limits of their sizes come from, such as ``built in`` or ``cache``.
    limits_from: List[str]
    #: Where fixed order is asked for: reductions that round, in it, and not (NCCL ran them, or they were refused); absent where
    #: there were none.
    in_fixed_order: int
    not_in_fixed_order: int
    #: Of one without a peer group: what a rank says of the reason, which rank, and what would change it.
    reason: str
    reason_rank: int
    change: str
    #: Calls that a graph capture recorded, as far as known.
    recorded: int
    #: Bytes of the device's memory that Windlass takes for it, and whether it has given them back (``ncclCommSuspend``).
    memory_bytes: int
    sleeps: bool
    calls: List[Calls]


class Stats(TypedDict, total=False):
    """What one process did."""

    #: Windlass's version.
    windlass: str
    #: The process's number, and the file name of its program.
    process: int
    program: str
    #: Of a process that was forked from one with communicators: that one. Nothing is counted then.
    forked_from: int
    #: The real NCCL's file, and its version code (0 if unknown).
    nccl_path: str
    nccl_version: int
    #: When counting began, nanoseconds since 1970.
    began_ns: int
    communicators_made: int
    #: NCCL's communicators that are cached behind ended lazy ones, and bytes of device memory that they keep.
    cached: int
    cached_bytes: int
    #: ``fixed`` or ``strict``; absent where no fixed order is asked for.
    order: str
    #: Kernels of Windlass that ran several collectives of a group each, and how many these ran.
    fused_kernels: int
    fused_calls: int
    #: Counters of buffers registered with NCCL, of memory that is used again, of windows, of calls that ranks compare: only
    #: those that are not 0.
    registrations: Dict[str, int]
    pool: Dict[str, int]
    windows: Dict[str, int]
    #: Calls by function, only of those called.
    functions: Dict[str, int]
    communicators: List[Communicator]


def stats(process: Optional[int] = None) -> Stats:
    """What a process has counted so far: this one's counters, or those of the running process with that number.

    Another process must be of the same user and see the same ``/dev/shm``, and it counts from its first communicator on.
    Raises :class:`windlass.Error`, with the reason, where there are no counters.
    """
    return _of_this_process() if process is None or process == os.getpid() else _of(process)


def _of_this_process() -> Stats:
    found = loaded()
    if found is None or not found.is_windlass or found.handle is None:
        other = "no NCCL is loaded yet" if found is None else f"calls go to {found.path}"
        raise Error(f"this process has no Windlass ({other}): see windlass.enable(), or use `windlass run -- ...`")
    dump = found.handle.windlassDump
    dump.argtypes, dump.restype = [ctypes.c_char_p], ctypes.c_int
    # The library renames the finished file to this name, so its folder must be no other's.
    with tempfile.TemporaryDirectory(prefix="windlass-stats-") as folder:
        path = os.path.join(folder, "stats.json")
        result = dump(os.fsencode(path))
        if result != 0:
            raise Error(f"windlassDump ended with {result}: its reason is in the log (WINDLASS_LOG=error)")
        with open(path, encoding="utf-8", errors="replace") as file:
            return _read(file.read())[-1]


def _of(process: int) -> Stats:
    asked = subprocess.run(
        [command(), "stats", "--json", str(process)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if asked.returncode != 0:
        told = asked.stderr.decode(errors="replace").strip()
        raise Error(told[len("windlass: ") :] if told.startswith("windlass: ") else told)
    # Processes of several containers may have one number in a shared /dev/shm, and a killed one leaves its counters.
    return max(_read(asked.stdout.decode(errors="replace")), key=lambda counted: counted["began_ns"])


def _read(text: str) -> List[Stats]:
    """The reports in a text, one a line."""
    reports: List[Any] = [json.loads(line) for line in text.splitlines() if line]
    return cast(List[Stats], reports)
