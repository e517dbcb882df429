#!/usr/bin/env python3
"""Holds JSON lines of `windlass bench` against what is asked of fast collectives on 4 x H200 without multicast.

    scripts/asked.py FILE...

Prints a line a figure: NCCL's time, ours, at most which was asked, in microseconds of one call of fp32. Of a figure that was
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


def main():
    lines = [json.loads(line) for path in sys.argv[1:] for line in pathlib.Path(path).read_text().splitlines()]
    figures = {(line["op"], line["bytes"], line["mode"]): line for line in lines
               if line.get("type") == "float" and line.get("ranks") == 4}
    print(f"{'operation':22}{'bytes':>10}  {'mode':6}{'NCCL':>9}{'ours':>9}{'asked':>9}  {'ratio':>6}  reached")
    counted = [tell(figure, asked(*key, figure)) for key, figure in sorted(figures.items())]
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
    reached = ours <= limit
    print(f"{figure['op']:22}{figure['bytes']:>10}  {figure['mode']:6}{plain:9.2f}{ours:9.2f}{limit:9.2f}"
          f"  {ours / plain:6.3f}  {'yes' if reached else 'NO'}  {figure['path']}")
    return reached


if __name__ == "__main__":
    main()
