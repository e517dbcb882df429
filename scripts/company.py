#!/usr/bin/env python3
"""Holds JSON lines of `windlass bench` with other communicators (`--beside`, `--busy`) against what is asked: that a call beside idle
communicators takes as long as without them, and never longer than NCCL's beside as many of its own.

    scripts/company.py FILE...

Prints a line for each operation, size, mode and company: NCCL's time and ours in microseconds, what each is of its own without company, ours
of NCCL's, and what is missed: `own`, more than 2 % above our own without company; `nccl`, above NCCL's. Beside busy communicators, which
take their part of the GPU, `own` is not asked. The runs of two companies are processes of their own: NCCL's own ratio tells what of ours may be
chance. Of what was measured more than once the last counts. Ends with 0 whatever was missed, with 1 where nothing was measured.
"""

import json
import pathlib
import sys

OWN_RATIO_MAX = 1.02
# So much of a batch all busy communicators must have run, or the line says little.
BUSY_PART_MIN = 0.9


def main():
    lines = [json.loads(line) for path in sys.argv[1:] for line in pathlib.Path(path).read_text().splitlines()]
    figures = {key(line): line for line in lines if "plain_us" in line and line.get("mode") in ("eager", "graph")}
    if not figures:
        sys.exit("company: nothing measured")
    print(f"{'operation':16}{'bytes':>10}  {'mode':6}{'company':>9}{'NCCL':>10}{'ours':>10}{'NCCL own':>10}{'ours own':>10}{'of NCCL':>9}  {'path':9} missed")
    missed = [tell(figure, figures.get((*place[:-2], 0, 0))) for place, figure in sorted(figures.items())]
    own, nccl = (sum(what in each for each in missed) for what in ("own", "nccl"))
    print(f"company: of {len(missed)} figures {own} are more than {OWN_RATIO_MAX - 1:.0%} above our own without company, {nccl} above NCCL's")


def key(line):
    """What may be compared has all but the last two in common: busy and idle communicators."""
    place = (line["ranks"], line["op"], line["type"], line["bytes"], line["mode"])
    return (*place, line.get("busy", 0), line.get("beside", 0))


def tell(figure, alone):
    """Prints a line; what is missed. `alone`: the same without company, if it was measured."""
    plain, ours, busy = figure["plain_us"], figure["windlass_us"], figure.get("busy", 0)
    missed = []
    if alone and not busy and ours > OWN_RATIO_MAX * alone["windlass_us"]:
        missed.append("own")
    if ours > plain:
        missed.append("nccl")
    owns = [of(figure[side], alone[side] if alone else None) for side in ("plain_us", "windlass_us")]
    told = " ".join(missed) + idled(figure)
    print(f"{figure['op']:16}{figure['bytes']:>10}  {figure['mode']:6}{company(figure):>9}{plain:10.2f}{ours:10.2f}{owns[0]:>10}{owns[1]:>10}"
          f"{of(ours, plain):>9}  {figure['path']:9} {told}".rstrip())
    return missed


def of(time, other):
    return f"{time / other:.3f}" if other else "-"


def company(figure):
    beside, busy = figure.get("beside", 0), figure.get("busy", 0)
    return " ".join([f"{beside}"] * bool(beside or not busy) + [f"busy {busy}"] * bool(busy))


def idled(figure):
    """Where the busy ones were not so all the while."""
    parts = [figure.get(f"{side}_busy_part") for side in ("plain", "windlass")]
    if not figure.get("busy") or all(part is None or part >= BUSY_PART_MIN for part in parts):
        return ""
    return "  (busy for " + ", ".join("?" if part is None else f"{part:.2f}" for part in parts) + " of a batch)"


if __name__ == "__main__":
    main()
