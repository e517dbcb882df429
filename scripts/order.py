#!/usr/bin/env python3
"""Puts two runs of `windlass bench` under WINDLASS_ORDER=fixed side by side: one with NCCL left alone, one with NCCL under variables that
pin its order.

    scripts/order.py ALONE.jsonl PINNED.jsonl

Prints a line for each operation, type, size and mode: microseconds of NCCL, of NCCL pinned and of Windlass in fixed order, and what Windlass's
time is of each. At the end the geometric means by operation and mode. Ends with 1 where nothing was measured, or a call was not native.
"""

import itertools
import json
import math
import pathlib
import sys


def main():
    alone, pinned = (read(path) for path in sys.argv[1:3])
    lines = [compare(place, alone[place], pinned.get(place)) for place in sorted(alone)]
    if not lines:
        sys.exit("order: nothing measured")
    first = next(iter(alone.values()))
    print(f"{first['ranks']} ranks, {first['machine']['gpu']}, driver {first['machine']['driver']}, NCCL {first['versions']['nccl']}, {first['date']}")
    print(f"{'operation':16}{'type':10}{'':6}{'mode':7}{'bytes':>10}{'NCCL us':>11}{'pinned us':>11}{'fixed us':>11}{'of NCCL':>9}{'of pinned':>11}  path")
    for line in lines:
        print(line["text"])
    for (operation, mode), some in itertools.groupby(sorted(lines, key=group), key=group):
        some = list(some)
        means = [mean([line[name] for line in some if line[name]]) for name in ("of_nccl", "of_pinned")]
        print(f"{operation}, {mode}: in the geometric mean {means[0]} of NCCL's time, {means[1]} of pinned NCCL's, over {len(some)} figures")
    lost = sum(not line["native"] for line in lines)
    print(f"order: {len(lines)} figures, {lost} not native")
    return bool(lost)


def read(path):
    """Of what was measured more than once the last counts."""
    file = pathlib.Path(path)
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    places = ("op", "type", "reduction", "mode", "bytes")
    return {tuple(record[name] for name in places): record for record in records if "windlass_us" in record}


def compare(place, alone, pinned):
    operation, element, reduction, mode, size = place
    nccl, ours = alone["plain_us"], alone["windlass_us"]
    slow = pinned["plain_us"] if pinned else None
    paths = {record["path"] for record in (alone, pinned) if record}
    of_pinned = ours / slow if slow else None
    text = (f"{operation:16}{element:10}{reduction:6}{mode:7}{size:>10}{nccl:11.2f}{shown(slow, 11, 2)}{ours:11.2f}{ours / nccl:9.3f}"
            f"{shown(of_pinned, 11, 3)}  {' '.join(sorted(paths))}")
    return {"place": place, "of_nccl": ours / nccl, "of_pinned": of_pinned, "native": paths == {"native"}, "text": text}


def shown(number, width, digits):
    return f"{number:{width}.{digits}f}" if number else f"{'-':>{width}}"


def group(line):
    return line["place"][0], line["place"][3]


def mean(ratios):
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}" if ratios else "-"


if __name__ == "__main__":
    sys.exit(main())
