#!/usr/bin/env python3
"""Makes tables from JSON lines of `windlass bench`, one line a cell.

    scripts/measure/table.py FILE...                  all cells: the form that docs/measurements keeps
    scripts/measure/table.py --company FILE...        calls beside other communicators, against the same calls without
    scripts/measure/table.py --order ALONE PINNED     calls in fixed order, against NCCL left alone and NCCL with its order pinned

A FILE has JSON lines or a table. Times are microseconds of one call. `ratio` is Windlass's time over NCCL's. `busy` says in which part of a
batch the busy communicators ran, with NCCL and with Windlass.

--company marks what is missed: `own`, more than 2 % above Windlass's time without company (not asked beside busy ones); `nccl`, above NCCL's
time. The runs of two companies are processes of their own: how NCCL's own time changes tells what may be chance. --order ends with means,
and with status 1 where a call was not native. Of what was measured more than once, these two count the last.
"""

import itertools
import json
import math
import pathlib
import re
import sys

COLUMNS = ("op", "type", "reduction", "mode", "bytes", "nccl_us", "windlass_us", "ratio", "path", "busy")
NUMBERS = {"bytes": int, "nccl_us": float, "windlass_us": float, "ratio": float}
PLACE = COLUMNS[:5]
OWN_RATIO_MAX = 1.02
# So much of a batch all busy communicators must have run, or the cell says little.
BUSY_PART_MIN = 0.9


def main():
    view, paths = (sys.argv[1], sys.argv[2:]) if sys.argv[1:2] in (["--company"], ["--order"]) else ("", sys.argv[1:])
    if not paths or paths[0].startswith("-") or (view == "--order" and len(paths) != 2):
        sys.exit(__doc__)
    files = [read(path) for path in paths]
    if not files[0]:
        sys.exit(f"{paths[0]}: nothing measured")
    return {"": all_cells, "--company": company, "--order": order}[view](*files)


def read(path):
    text = pathlib.Path(path).read_text()
    return [cell_of(line) for line in map(json.loads, text.splitlines()) if "plain_us" in line] if text.startswith("{") else parsed(text)


def cell_of(line):
    machine, versions = line["machine"], line["versions"]
    variables = " ".join(f"{name}={value}" for name, value in machine.get("variables", {}).items())
    counts = [f"{line[kind]} {word}" for kind, word in (("beside", "idle"), ("busy", "busy")) if line.get(kind)]
    parts = [line.get(f"{side}_busy_part") for side in ("plain", "windlass")]
    head = {"machine": f"{line['ranks']} ranks, {machine['gpu']}, driver {machine['driver']}, CUDA {machine['cuda'] // 1000}.{machine['cuda'] % 1000 // 10}",
            "versions": f"NCCL {versions['nccl']}, Windlass {versions['windlass']}", "date": line["date"][:10], "variables": variables or "none",
            "variant": line.get("variant", "none"), "company": ", ".join(counts) or "none"}
    cell = {"op": line["op"], "type": line["type"], "reduction": line.get("reduction", "-"), "mode": line["mode"], "bytes": line["bytes"],
            "nccl_us": line["plain_us"], "windlass_us": line["windlass_us"], "ratio": line["windlass_us"] / line["plain_us"], "path": line["path"],
            "busy": ",".join(f"{part:.2f}" for part in parts if part is not None) or "-"}
    return {**cell, "head": head}


def parsed(table):
    """The cells of a table. Each block has lines `# name: value`, then the columns' names, then cells."""
    cells, head, columns = [], {}, ()
    for line in table.splitlines():
        if line.startswith("# "):
            head, columns = {} if columns else head, ()
            name, value = line[2:].split(": ", 1)
            head[name] = value
        elif not columns:
            columns = line.split()
        elif line:
            cell = dict(zip(columns, line.split()))
            cells.append({"busy": "-", **cell, **{name: kind(cell[name]) for name, kind in NUMBERS.items()}, "head": head})
    return cells


def all_cells(*files):
    for head, cells in itertools.groupby(itertools.chain(*files), key=lambda cell: cell["head"]):
        print("\n".join(f"# {name}: {value}" for name, value in head.items()))
        rows = [COLUMNS] + [tuple(shown(cell[name]) for name in COLUMNS) for cell in cells]
        if all(row[-1] == "-" for row in rows[1:]):
            rows = [row[:-1] for row in rows]
        print_aligned(rows)


def shown(value):
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if value < 100 else f"{value:.2f}"


def print_aligned(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print(" ".join(f"{text:>{width}}" if 4 <= place <= 7 else f"{text:{width}}" for place, (text, width) in enumerate(zip(row, widths))).rstrip())


def company(*files):
    cells = {(*place(cell), cell["head"]["machine"], cell["head"]["company"]): cell for cell in itertools.chain(*files)}
    print(f"{'op':16}{'bytes':>10}  {'mode':6}{'company':>9}{'NCCL':>10}{'Windlass':>10}{'NCCL own':>10}{'own':>7}{'ratio':>7}  {'path':9} missed")
    missed = [tell(cell, cells.get((*key[:-1], "none"))) for key, cell in sorted(cells.items(), key=lambda item: (*item[0][:-1], item[0][-1] != "none", item[0][-1]))]
    own, nccl = (sum(what in each for each in missed) for what in ("own", "nccl"))
    print(f"company: of {len(missed)} cells {own} are more than {OWN_RATIO_MAX - 1:.0%} above their own without company, {nccl} above NCCL's")


def tell(cell, alone):
    """Prints a line; what is missed. `alone`: the same without company, if it was measured."""
    beside, owns = cell["head"]["company"], [cell[side] / alone[side] if alone else math.nan for side in ("nccl_us", "windlass_us")]
    missed = ["own"] * ("busy" not in beside and owns[1] > OWN_RATIO_MAX) + ["nccl"] * (cell["ratio"] > 1)
    idle = any(float(part) < BUSY_PART_MIN for part in re.findall(r"[\d.]+", cell["busy"]))
    told = " ".join(missed + [f"(busy for {cell['busy']} of a batch)"] * idle)
    print(f"{cell['op']:16}{cell['bytes']:>10}  {cell['mode']:6}{beside:>9}{cell['nccl_us']:10.2f}{cell['windlass_us']:10.2f}{owns[0]:10.3f}{owns[1]:7.3f}"
          f"{cell['ratio']:7.3f}  {cell['path']:9} {told}".rstrip())
    return missed


def order(alone, pinned):
    under_pins, rows = {place(cell): cell for cell in pinned}, []
    print("".join(f"{name}: {value}\n" for name, value in alone[0]["head"].items() if name in ("machine", "versions", "date")), end="")
    print(f"{'op':16}{'type':10}{'':6}{'mode':7}{'bytes':>10}{'NCCL us':>11}{'pinned us':>11}{'fixed us':>11}{'of NCCL':>9}{'of pinned':>11}  path")
    for key, cell in sorted({place(cell): cell for cell in alone}.items()):
        slow = under_pins.get(key)
        pinned_us = slow["nccl_us"] if slow else math.nan
        row = {**cell, "of_pinned": cell["windlass_us"] / pinned_us, "paths": {each["path"] for each in (cell, slow) if each}}
        rows.append(row)
        print(f"{cell['op']:16}{cell['type']:10}{cell['reduction']:6}{cell['mode']:7}{cell['bytes']:>10}{cell['nccl_us']:11.2f}{pinned_us:11.2f}"
              f"{cell['windlass_us']:11.2f}{cell['ratio']:9.3f}{row['of_pinned']:11.3f}  {' '.join(sorted(row['paths']))}")
    for (op, mode), some in itertools.groupby(sorted(rows, key=by_mode), key=by_mode):
        some = list(some)
        means = [mean(row[name] for row in some) for name in ("ratio", "of_pinned")]
        print(f"{op}, {mode}: in the geometric mean {means[0]:.2f} of NCCL's time, {means[1]:.2f} of pinned NCCL's, over {len(some)} figures")
    lost = sum(row["paths"] != {"native"} for row in rows)
    print(f"order: {len(rows)} figures, {lost} not native")
    return bool(lost)


def place(cell):
    return tuple(cell[name] for name in PLACE)


def by_mode(cell):
    return cell["op"], cell["mode"]


def mean(ratios):
    """The geometric mean of those that were measured."""
    logs = [math.log(ratio) for ratio in ratios if not math.isnan(ratio)]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


if __name__ == "__main__":
    sys.exit(main())
