#!/usr/bin/env python3
"""Compares the output of a test program on NCCL alone with that through Windlass.

    same_output.py NCCL_DIR WINDLASS_DIR
"""

import difflib
import pathlib
import sys


def main():
    alone, windlass = (pathlib.Path(folder) / "output.txt" for folder in sys.argv[1:3])
    difference = list(difflib.unified_diff(alone.read_text().splitlines(), windlass.read_text().splitlines(),
                                           "on NCCL alone", "through Windlass", lineterm=""))
    print("\n".join(difference) if difference else f"equal: {len(alone.read_text().splitlines())} lines")
    sys.exit(1 if difference or not alone.read_text() else 0)


if __name__ == "__main__":
    main()
