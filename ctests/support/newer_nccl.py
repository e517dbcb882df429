#!/usr/bin/env python3
"""Runs a program over the simulator of NCCL with the functions that newer_nccl.c adds.

    newer_nccl.py COMPILER INCLUDES SIMULATOR OUT RUNNER_ARGUMENT...

INCLUDES are separated by colons. The simulator is copied under another soname, because the loader takes Windlass for a library that
needs libnccl.so.2; the runner (run.py) gets the two as `--nccl`.
"""

import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
SONAME, OTHER = b"\0libnccl.so.2\0", b"\0libnccl.so.0\0"


def main():
    compiler, includes, simulator, out = sys.argv[1:5]
    out = pathlib.Path(out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    original = pathlib.Path(simulator).read_bytes()
    if original.count(SONAME) != 1:
        sys.exit(f"{simulator}: {original.count(SONAME)} places with its soname, expected 1")
    copy, newer = out / "libnccl.so.0", out / "libnccl.so.2"
    copy.write_bytes(original.replace(SONAME, OTHER))
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", *(f"-I{folder}" for folder in includes.split(":")),
                    HERE / "newer_nccl.c", "-Wl,--no-as-needed", copy, "-Wl,-soname,libnccl.so.2", "-Wl,-rpath,$ORIGIN", "-o", newer], check=True)
    command = [sys.executable, HERE / "run.py", "--out", out / "run", "--nccl", newer, *sys.argv[5:]]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
