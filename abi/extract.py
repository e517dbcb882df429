#!/usr/bin/env python3
"""Writes the tables of one NCCL release: what its library exports, and what its header declares.

    extract.py VERSION WHEEL_DIR [--exports-only] [--check]

WHEEL_DIR is an unpacked wheel (`fetch.py VERSION DIR` makes one): it holds nvidia/nccl/include/nccl.h and
nvidia/nccl/lib/libnccl.so.2. The tables go to exports/VERSION.txt and header/VERSION.txt beside this script;
with --check they are compared with those instead, and the exit status is 1 if they differ.
"""

import argparse
import difflib
import pathlib
import re
import subprocess
import sys

import header

HERE = pathlib.Path(__file__).resolve().parent


def exported_names(library):
    """Functions named nccl* or pnccl* in the library's dynamic symbol table, sorted.

    Objects are left out: 2.30.3 exports four by accident, which no header declares.
    """
    command = ["nm", "-D", "--defined-only", str(library)]
    listing = subprocess.run(command, text=True, stdout=subprocess.PIPE, check=True)
    names = set()
    for line in listing.stdout.splitlines():
        kind, name = line.split()[-2:]
        name = name.split("@")[0]
        if kind in "TW" and re.match(r"p?nccl", name):
            names.add(name)
    return sorted(names)


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("version")
    arguments.add_argument("wheel", type=pathlib.Path, help="folder of an unpacked wheel")
    arguments.add_argument("--exports-only", action="store_true")
    arguments.add_argument("--check", action="store_true", help="compare with the committed tables, write nothing")
    options = arguments.parse_args()
    package = options.wheel / "nvidia" / "nccl"
    tables = {f"exports/{options.version}.txt": exported_names(package / "lib" / "libnccl.so.2")}
    if not options.exports_only:
        tables[f"header/{options.version}.txt"] = header.table(package / "include" / "nccl.h")
    act = differs if options.check else write
    sys.exit(1 if any([act(HERE / name, lines) for name, lines in tables.items()]) else 0)


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def differs(path, lines):
    """Prints how the committed table at `path` differs from `lines`; true if it does."""
    committed = path.read_text().splitlines()
    difference = list(difflib.unified_diff(committed, lines, f"{path} (committed)", "the wheel", lineterm=""))
    print("\n".join(difference) if difference else f"{path.name}: {len(lines)} lines of {path.parent.name}, equal")
    return bool(difference)


if __name__ == "__main__":
    main()
