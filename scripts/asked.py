#!/usr/bin/env python3
"""Holds JSON lines of `windlass bench` against what is asked on H200 without multicast: of native collectives of 4 ranks, of symmetric memory.

    scripts/asked.py FILE...

Prints a line a figure: NCCL's time, ours, at most which was asked, in microseconds: of one call of fp32, of the median of blocks and
windows in the steady state. Of what cycles leave behind it is bytes, or lines. Of a figure that was
measured more than once the last counts. Ends with 0 whatever was reached: it tells, it does not judge.
"""

import json
import pathlib
import sys

KIB, MIB = 1 << 10, 1 << 20
BLOCKS = (KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
# Microseconds in CUDA graphs, by bytes of the whole call.
GRAPH = {
    "all_reduce": dict(zip((KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
                           (2.9, 3.4, 4.3, 6.5, 10, 26, 84, 312))),
    "all_gather": dict(zip(BLOCKS, (2.8, 3.4, 6.7, 15, 45, 160))),
    "reduce_scatter": dict(zip(BLOCKS, (2.8, 3.4, 6.5, 14.2, 46, 165))),
    "alltoall": dict(zip(BLOCKS, (2.8, 3.4, 6.7, 15.3, 47, 162))),
    "uneven_all_gather": {4 * MIB: 18},
    "uneven_reduce_scatter": {4 * MIB: 18},
}
# A call on a stream may take that much more, up to that size.
EAGER_MORE_US, EAGER_BYTES_MAX = 0.5, 2 * MIB
# Of NCCL's time in graphs.
ROOTED, ROOTED_RATIO, ROOTED_BYTES_MAX = ("broadcast", "reduce"), 0.65, 64 * KIB
HOST_NS = 3000
# Microseconds of symmetric memory, by bytes of a block.
STEADY = {"alloc_and_free": {64 * MIB: 20}, "register": dict.fromkeys((2 * MIB, 64 * MIB, 1024 * MIB), 200)}
# What a driver may add beside cycles that leave nothing.
ADDED = {"memory_bytes": 4 * MIB, "map_lines": 16, "map_bytes": 4 * MIB}


def main():
    lines = [json.loads(line) for path in sys.argv[1:] for line in pathlib.Path(path).read_text().splitlines()]
    figures = {(line["op"], line["bytes"], line["mode"]): line for line in lines
               if line.get("type") == "float" and line.get("ranks") == 4}
    print(f"{'operation':22}{'bytes':>10}  {'mode':6}{'NCCL':>9}{'ours':>9}{'asked':>9}  {'ratio':>6}  reached")
    counted = [tell(figure, asked(*key, figure)) for key, figure in sorted(figures.items())]
    symmetric = {(row[0], row[1], row[2]): row for row in map(of_symmetric_memory, lines) if row}
    counted += [show(*row) for _, row in sorted(symmetric.items())]
    judged = [reached for reached in counted if reached is not None]
    print(f"asked: {sum(judged)} of {len(judged)} figures reached")


def asked(operation, size, mode, figure):
    """Microseconds; None where nothing was asked."""
    if mode == "host":
        return None if operation.startswith("uneven") else HOST_NS / 1000  # a group of calls
    if operation in ROOTED:
        return figure["plain_us"] * ROOTED_RATIO if mode == "graph" and size <= ROOTED_BYTES_MAX else None
    graph = GRAPH.get(operation, {}).get(size)
    if graph is None or mode == "graph":
        return graph
    return graph + EAGER_MORE_US if size <= EAGER_BYTES_MAX else None


def tell(figure, limit):
    """Prints a figure; whether it was reached, None if nothing was asked."""
    if limit is None:
        return None
    plain, ours = ((figure[side + "_host_ns"]["median"] / 1000 if figure["mode"] == "host" else figure[side + "_us"])
                   for side in ("plain", "windlass"))
    return show(figure["op"], figure["bytes"], figure["mode"], plain, ours, limit, figure["path"])


def of_symmetric_memory(line):
    """What there is to show of a line about it; None of other lines, and where nothing was asked."""
    ranks = f"{line['ranks']} GPU"
    if "grown" in line:
        told = f"added by {line['cycles']} cycles"
        return (line["grown"], line["bytes"], ranks, line["plain"]["added"], line["windlass"]["added"], ADDED[line["grown"]], told)
    limit = STEADY.get(line.get("what"), {}).get(line.get("bytes"))
    if limit is None:
        return None
    pool = line["windlass_pool"]
    told = f"pool hits {pool['hits']}, misses {pool['misses']}"
    return (line["what"], line["bytes"], ranks, line["plain_us"]["median"], line["windlass_us"]["median"], limit, told)


def show(what, size, mode, plain, ours, limit, told):
    """Prints a line; whether that was reached."""
    reached = ours <= limit
    ratio = f"{ours / plain:6.3f}" if plain else "     -"
    print(f"{what:22}{size:>10}  {mode:6}{plain:9.2f} {ours:8.2f} {limit:8.2f}  {ratio}  {'yes' if reached else 'NO'}  {told}")
    return reached


if __name__ == "__main__":
    main()
