"""Puts Windlass in front of NCCL, for this process or for those that it starts."""

import os
import subprocess
import sys
from typing import Dict, List, Optional, Union

from ._error import Error
from ._files import command, library
from ._loaded import loaded

#: Holds the process that has started again, so that it does so once. The program's children are no such process.
_RESTARTED = "_WINDLASS_RESTARTED"


def enable(*, restart: bool = True, nccl: Optional[Union[str, "os.PathLike[str]"]] = None) -> bool:
    """Puts Windlass in front of NCCL; call it first, before anything that loads NCCL is imported (``import torch`` does).

    With ``restart`` (the default) this process starts again from the beginning, with the same arguments, open files and
    process id, and with Windlass loaded. The call does not return then; made again in the new run it returns ``True`` at
    once. What the program has done until the call is done twice, so let it be little.

    Without ``restart`` only ``os.environ`` is changed: processes that this one starts from now on have Windlass, this one
    does not. It is for programs that start their ranks themselves, as ``torch.multiprocessing.spawn`` does. Processes that
    are forked without starting a program get no Windlass by it.

    ``nccl`` names the real NCCL. By default the one is taken that this Python's packages have, else that of the loader:
    ``windlass doctor`` shows the search.

    Returns whether this process has Windlass. Raises :class:`windlass.Error`, with the reason, where Windlass would not
    take effect: NCCL is loaded already, no real NCCL was found, the program cannot be started again.
    """
    found = loaded()
    if found is not None:
        if found.is_windlass:
            return True
        raise Error(
            f"NCCL is loaded already ({found.path}): call windlass.enable() before anything that loads it is imported, "
            "or start the program by `windlass run -- ...`"
        )
    if not restart:
        os.environ.update(_preload(nccl))
        return False
    _refuse_restart()
    environment = {**os.environ, **_preload(nccl), _RESTARTED: str(os.getpid())}
    for stream in (sys.stdout, sys.stderr):
        # What is buffered would be lost. A program without a console has no streams.
        if stream is not None:
            stream.flush()
    try:
        os.execve(sys.executable, _arguments(), environment)
    except OSError as error:
        raise Error(f"cannot start {sys.executable} again: {error.strerror}") from error


def _preload(nccl: Optional[Union[str, "os.PathLike[str]"]]) -> Dict[str, str]:
    """The variables that `windlass run` would set for this Python."""
    named = [] if nccl is None else [f"--nccl={os.fspath(nccl)}"]
    asked = subprocess.run(
        [command(), "run", "--check", *named, "--", sys.executable],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    told = os.fsdecode(asked.stderr)
    if asked.returncode != 0:
        raise Error(told.strip() or f"`windlass run --check` ended with {asked.returncode}")
    if sys.stderr is not None:
        sys.stderr.write(told)
    lines = os.fsdecode(asked.stdout).splitlines()
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def _arguments() -> List[bytes]:
    """How this process was started: Python's own options, too, which `sys.argv` lacks."""
    with open("/proc/self/cmdline", "rb") as file:
        arguments = file.read().split(b"\0")[:-1]
    # A bare `python` is looked up again when it starts, and may be another one than this.
    return [os.fsencode(sys.executable), *arguments[1:]]


def _refuse_restart() -> None:
    """Raises where a new run would not do what this one does."""
    if os.environ.get(_RESTARTED) == str(os.getpid()):
        raise Error(
            f"this process has started again, yet the loader did not load {library()}: "
            "its message is on standard error, or the program drops LD_PRELOAD"
        )
    # A process that `multiprocessing` made has this module.
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        raise Error(
            "this process belongs to a program by `multiprocessing`, and cannot start again by itself: call "
            "windlass.enable(restart=False) in that program, before it starts processes"
        )
    if not sys.executable:
        raise Error("Python does not know its own program, so it cannot start again: use `windlass run -- ...`")
    if hasattr(sys, "ps1") or sys.flags.interactive or "ipykernel" in sys.modules:
        raise Error(
            "an interactive session would lose what it has: start it by `windlass run -- ...`, "
            "or call windlass.enable(restart=False) for the processes that it starts"
        )
    if sys.argv[:1] in ([""], ["-"]):
        raise Error("the program was read from standard input, which is at its end: use `windlass run -- python ...`")
