#!/usr/bin/env python3
"""Holds that the harness and the runner fail where they must, and say why.

    proof.py SIM_DIR HARNESS_PROOF_PROGRAM ANY_PROGRAM OUT_DIR
"""

import pathlib
import re
import subprocess
import sys

RUN = pathlib.Path(__file__).resolve().parent / "run.py"
MODES = {
    "wrong-check": r"self->rank == 0 does not hold: 1, 0",
    "wrong-code": r"ncclGetVersion\(NULL\) answered 4, not 0",
    "dead-rank": r"rank 1 ended with status 3",
    "never-ends": r"time limit reached in never-ends\nrank 0: stays\nrank 1: stays\n",
    "checks-nothing": r"nothing was checked",
    "wrong-byte": r"byte \d+ is 7f, not ",
}


def main():
    sim, proof, program, out = map(pathlib.Path, sys.argv[1:5])
    base = [sys.executable, RUN, "--out", out, "--nccl", sim / "libnccl.so.2", "--cuda", sim]
    wrong = 0
    for mode, words in MODES.items():
        wrong += not fails([*base, "--", proof, mode], words, mode)
    # Another library in Windlass's place, so no call is counted.
    wrong += not fails([*base, "--windlass", sim, "--", program], r"was called \d+ times, Windlass counted 0",
                       "not Windlass")
    sys.exit(1 if wrong else 0)


def fails(command, words, sentence):
    result = subprocess.run([str(word) for word in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    proven = result.returncode == 1 and re.search(words, result.stderr)
    print(("ok      " if proven else "FAILED  ") + sentence)
    if not proven:
        print(f"  exit {result.returncode}\n  stdout: {result.stdout}\n  stderr: {result.stderr}")
    return bool(proven)


if __name__ == "__main__":
    main()
