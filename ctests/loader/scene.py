"""What the loader tests share: folders from variables that CTest sets, and functions that run programs and check them."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

WINDLASS = pathlib.Path(os.environ["CTESTS_WINDLASS_DIR"])
BUILD = pathlib.Path(os.environ["CTESTS_BUILD_DIR"])
PRELOAD = WINDLASS / "libnccl.so.2"
TOYS = BUILD / "toys"
SIM = pathlib.Path(os.environ["CTESTS_SIM_DIR"]) if os.environ.get("CTESTS_SIM_DIR") else None
WHEELS = pathlib.Path(os.environ["CTESTS_WHEEL_DIR"]) if os.environ.get("CTESTS_WHEEL_DIR") else None
ROOT = pathlib.Path(__file__).resolve().parents[2]

SKIPPED = 77
failures = 0


def run(*command, **variables):
    """Runs a program with only the given variables of Windlass set; returns its result, with text."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("WINDLASS_", "CTESTS_", "LD_", "NCCL_"))}
    kept.update({name: str(value) for name, value in variables.items()})
    return subprocess.run([str(word) for word in command], env=kept, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, timeout=60)


def paths(*folders):
    return ":".join(str(folder) for folder in folders)


def check(holds, sentence, result=None):
    """Counts and prints one check; prints the program's output if it fails."""
    global failures
    print(("ok      " if holds else "FAILED  ") + sentence)
    if not holds:
        failures += 1
        if result is not None:
            print(f"  exit {result.returncode}\n  stdout: {result.stdout}\n  stderr: {result.stderr}")
    return holds


def check_quiet(result, sentence):
    check(result.returncode == 0 and result.stderr == "", sentence + ": exit 0, empty standard error", result)


def log_lines(result):
    """The lines that Windlass logged."""
    return [line for line in result.stderr.splitlines() if " WINDLASS " in line]


@contextlib.contextmanager
def scratch():
    with tempfile.TemporaryDirectory(prefix="windlass-loader-") as folder:
        yield pathlib.Path(folder)


def functions_of(folder):
    """The summed `functions` of all reports in `folder`."""
    total = {}
    for path in pathlib.Path(folder).glob("report-*.json"):
        for name, calls in json.loads(path.read_text())["functions"].items():
            total[name] = total.get(name, 0) + calls
    return total


def copy(library, folder):
    """A copy of `library` named libnccl.so.2 in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    return pathlib.Path(shutil.copy(os.path.realpath(library), folder / "libnccl.so.2"))


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def done():
    sys.exit(1 if failures else 0)
