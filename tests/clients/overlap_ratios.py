"""Compares runs of `torch_overlap.py`: overlap_ratios.py FOLDER, which has their lines in nccl.* and windlass.*.

Prints a line a figure: medians over runs and their ratio. Ends with 1 if Windlass is slower anywhere by more than 2 %, and
the runs of the two do not overlap there, or if it did not run.
"""

import json
import pathlib
import statistics
import sys

SLOWER = 1.02


def read(folder, side):
    """Microseconds of every run, by figure."""
    found = {}
    for path in sorted(pathlib.Path(folder).glob(side + ".[0-9]*")):
        for line in path.read_text().splitlines():
            if not line.startswith("{"):
                continue
            figure = json.loads(line)
            found.setdefault((figure["op"], figure["products"], figure["mode"], figure["bytes"]), []).append(figure["us"])
    return found


def main():
    nccl, windlass = read(sys.argv[1], "nccl"), read(sys.argv[1], "windlass")
    slower = []
    print(f"{'collective':21}{'products':>9}  {'mode':6}{'bytes':>10}{'NCCL us':>10}{'ours us':>10}   ratio  runs")
    figures = sorted(nccl.keys() & windlass.keys())
    for key in figures:
        before, after = nccl[key], windlass[key]
        ratio = statistics.median(after) / statistics.median(before)
        is_slower = ratio > SLOWER and min(after) > max(before)
        slower += [key] if is_slower else []
        print(f"{key[0]:21}{key[1]:>9}  {key[2]:6}{key[3]:>10}{statistics.median(before):10.2f}{statistics.median(after):10.2f}"
              f"  {ratio:6.3f}  {len(before)}, {len(after)}{'  SLOWER' if is_slower else ''}")
    print(f"overlap: {len(slower)} of {len(figures)} slower than NCCL by more than 2 %, beyond the spread of runs")
    sys.exit(1 if slower or not figures else 0)


if __name__ == "__main__":
    main()
