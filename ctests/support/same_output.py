#!/usr/bin/env python3
"""Compares what a test program printed plainly and through Windlass.

    same_output.py PLAIN_DIR WINDLASS_DIR
"""

import difflib
import pathlib
import sys


def main():
    plain, windlass = (pathlib.Path(folder) / "output.txt" for folder in sys.argv[1:3])
    difference = list(difflib.unified_diff(plain.read_text().splitlines(), windlass.read_text().splitlines(),
                                           "plain", "through Windlass", lineterm=""))
    print("\n".join(difference) if difference else f"equal: {len(plain.read_text().splitlines())} lines")
    sys.exit(1 if difference or not plain.read_text() else 0)


if __name__ == "__main__":
    main()
