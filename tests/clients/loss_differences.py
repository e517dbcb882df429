"""Compares two runs of `torch_losses.py`: loss_differences.py NCCL WINDLASS.

Holds that within each run all ranks have the same losses and parameters, to the bit, and that the losses of both runs differ by no more than
floats summed in another order make them: a part in a thousand of the first loss, with 16-bit parameters a part in a hundred. The
first step's, before any sum has reached the parameters, by no more than a part in a million.
"""

import json
import pathlib
import sys

FIRST, LATER = 1e-6, {"ddp": 1e-3, "fsdp": 1e-3, "fsdp_bf16": 1e-2}


def read(path):
    lines = (json.loads(line) for line in pathlib.Path(path).read_text().splitlines() if line.startswith("{"))
    return {line["way"]: line for line in lines}


def main():
    nccl, windlass = (read(path) for path in sys.argv[1:3])
    wrong = [f"no {way}" for way in LATER if way not in nccl or way not in windlass]
    for way in (way for way in LATER if way in nccl and way in windlass):
        same = {name: len({json.dumps(losses) for losses in run["losses"]}) == 1 and len(set(run["digests"])) == 1
                for name, run in (("NCCL", nccl[way]), ("Windlass", windlass[way]))}
        wrong += [f"{way} over {name}: ranks differ" for name, held in same.items() if not held]
        before, after = nccl[way]["losses"][0], windlass[way]["losses"][0]
        differences = [abs(left - right) / before[0] for left, right in zip(before, after)]
        if not differences[0] <= FIRST or not max(differences) <= LATER[way]:
            wrong.append(f"{way}: losses differ")
        ranks = ", ".join(f"over {name} {'equal' if held else 'NOT equal'}" for name, held in same.items())
        print(f"{way}: {len(before)} steps, loss {before[0]:.6f} to {before[-1]:.6f} over NCCL, {after[-1]:.6f} over Windlass; differing"
              f" by {differences[0]:.1e} of the first loss at first, {max(differences):.1e} at most; all ranks {ranks}; parameters of both"
              f" {'equal' if nccl[way]['digests'][0] == windlass[way]['digests'][0] else 'differ'}")
    print("losses: " + ("; ".join(wrong) or "equal within the tolerance, ranks to the bit"))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
