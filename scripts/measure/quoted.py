#!/usr/bin/env python3
"""Makes again each figure that a page, or a comment in code, quotes from the tables in docs/measurements, and holds it against the text.

    scripts/measure/quoted.py

Prints a line for each text: file, words, figures made again, and whether these stand there. Ends with status 1 where some differ. Who changes a table
or such a text changes the list below. Figures from the plain outputs of other programs are not in it: they stand there as they are.
"""

import decimal
import pathlib
import re
import sys

import table

ROOT = pathlib.Path(__file__).resolve().parents[2]
NUMBER = r"\d+(?:\.\d+)?"
KIB, MIB = 1 << 10, 1 << 20
NAMES = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "alltoall": "all-to-all", "send_ring": "ring of sends",
         "send_one_way": "send, one way", "send_both_ways": "send, both ways", "uneven_all_gather": "uneven all-gather", "uneven_reduce_scatter": "uneven reduce-scatter"}
FIVE = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter")
PERFORMANCE, COLLECTIVES = "docs/performance.md", "docs/collectives.md"


def main():
    differ = 0
    for file, text, *figures in [*of_grids(), *of_limits(), *of_environments(), *of_others()]:
        pattern = re.sub(r"\s+", r"\\s+(?:///?\\s+)?", re.escape(text).replace(r"\{\}", f"({NUMBER})").replace(r"\ ", " "))
        stand = [found.groups() for found in re.finditer(pattern, (ROOT / file).read_text())] or [("no such text",)]
        agrees = tuple(figures) in stand
        differ += not agrees
        print(f"{file}: {text}: {' '.join(figures)}", "agrees" if agrees else f"DIFFERS: {', or '.join(map(' '.join, stand))}", sep="; ")
    if differ:
        print(f"quoted: {differ} texts differ")
    return bool(differ)


def cells(name, least=0, most=1 << 40, **wanted):
    """Of a table: cells whose columns, or lines of the head, have a value or one of several."""
    def fits(cell):
        values = {**cell["head"], **cell}
        return least <= cell["bytes"] <= most and all(values[key] in (value if isinstance(value, tuple) else (value,)) for key, value in wanted.items())
    return [cell for cell in table.read(ROOT / f"docs/measurements/{name}.txt") if fits(cell)]


def mean(some):
    return f"{table.mean(cell['ratio'] for cell in some):.2f}"


def most(some):
    return f"{max(cell['ratio'] for cell in some):.2f}"


def span(some):
    return f"{min(cell['ratio'] for cell in some):.2f}", most(some)


def above(some, ratio=1.02):
    return [cell for cell in some if cell["ratio"] > ratio]


def count(some):
    return str(len(some))


def by_mode(some):
    return [[cell for cell in some if cell["mode"] == mode] for mode in ("graph", "eager")]


def short(us):
    """Three digits, half up."""
    step = "0.01" if us < 9.995 else "0.1" if us < 99.95 else "1"
    return str(decimal.Decimal(str(us)).quantize(decimal.Decimal(step), decimal.ROUND_HALF_UP))


def rows(name, mode, ops):
    """Lines of a page's table, each times of NCCL and Windlass for six sizes."""
    for op in ops:
        sized = {cell["bytes"]: cell for cell in cells(name, op=op, mode=mode)}
        near = lambda size: next(cell for bytes, cell in sized.items() if size * 0.99 < bytes <= size)
        some = [near(size * KIB) for size in (1, 64, 1024, 4096, 16384, 65536)]
        figures = [short(cell[side]) for cell in some for side in ("nccl_us", "windlass_us")]
        yield PERFORMANCE, f"| {NAMES.get(op, op)} |" + " {} / {} |" * 6, *figures


def of_grids():
    two, three, four = (cells(f"2026-11-26-grids/bench-{ranks}") for ranks in (2, 3, 4))
    graph, eager = by_mode(two)
    yield "README.md", "{} of NCCL's time for nine operations in CUDA graphs", mean(graph)
    yield "README.md", "[{}](docs/performance.md#collectives-and-messages-of-2-ranks) in the geometric mean, {} at most", mean(graph), most(graph)
    yield PERFORMANCE, "nine operations, 1 KiB to 64 MiB, in CUDA graphs | {} in the geometric mean, {} at most", mean(graph), most(graph)
    yield PERFORMANCE, "the same, eager | {} in the geometric mean, {} at most", mean(eager), most(eager)
    ops = tuple(dict.fromkeys(cell["op"] for cell in two))
    yield from rows("2026-11-26-grids/bench-2", "graph", ops)
    yield from rows("2026-11-26-grids/bench-2", "eager", ops)
    yield from rows("2026-11-26-grids/bench-4", "graph", (*FIVE, "uneven_all_gather", "uneven_reduce_scatter", "alltoall", "send_ring"))
    graph, eager = by_mode([cell for cell in four if cell["op"] != "send_beside_product"])
    yield PERFORMANCE, "without sends beside products | {} in the geometric mean; {} of {} cells above 1.02, {} at most", mean(graph), count(above(graph)), count(graph), most(graph)
    yield "README.md", "[{}](docs/performance.md#collectives-of-4-ranks) in the geometric mean, {} at most", mean(graph), most(graph)
    yield (PERFORMANCE, "13 operations and 10 sizes: {} of NCCL's time in graphs, {} eager. Of 3 ranks, over 8 operations and 9 sizes: {} and {}",
           *map(mean, (graph, eager)), *map(mean, by_mode(three)))
    large = [cell for cell in above(graph + eager) if cell["op"] in ("alltoall", "send_alltoall")]
    yield PERFORMANCE, "All-to-alls of 256 MiB, {} to {}", *span(large)
    some = cells("2026-11-26-grids/bench-4", op="send_beside_product", least=256 * KIB, most=4 * MIB)
    yield PERFORMANCE, "five of six cells {} to {}", *span(above(some))
    idle, busy = cells("2026-11-26-grids/beside-8"), cells("2026-11-26-grids/busy-3")
    yield PERFORMANCE, "beside eight idle ones {} in graphs, and no cell of {} above 1.02", mean(by_mode(idle)[0]), count(idle)
    yield PERFORMANCE, "Beside three busy ones {}, and four of {} above", mean(by_mode(busy)[0]), count(busy)
    yield PERFORMANCE, "of 64 MiB, both on NCCL, up to {}", most(busy)
    five = [[cell for cell in some if cell["op"] in FIVE] for some in (two, four)]
    (graph2, eager2), (graph4, eager4) = map(by_mode, five)
    yield COLLECTIVES, "five collectives take {} of NCCL's time in graphs, in the geometric mean of {} cells", mean(graph2), count(graph2)
    yield (COLLECTIVES, "they take {}, up to 256 MiB. Eager they take {} and {}, and none of these {} cells", *map(mean, (graph4, eager2, eager4)),
           count(five[0] + five[1]))
    graph = by_mode(four)[0]
    yield COLLECTIVES, "uneven all-gathers of 4 to 256 MiB take {} to {}", *span([cell for cell in graph if cell["op"] == "uneven_all_gather" and cell["bytes"] > 3 * MIB])
    some = [cell for cell in graph if cell["op"] == "uneven_reduce_scatter" and 3 * MIB < cell["bytes"] <= 64 * MIB]
    yield COLLECTIVES, "reduce-scatters of 4 to 64 MiB {} to {}", *span(some)


def of_limits():
    folder = "2026-11-26-limits/"
    types, beside, others = cells(folder + "types"), cells(folder + "beside"), cells(folder + "company")
    is_usual = lambda cell: cell["reduction"] == "sum" and cell["type"] in ("float", "half", "bfloat16")
    int8_averages = lambda some: [cell for cell in some if cell["reduction"] == "avg" and cell["type"] == "int8"]
    left = lambda some: [cell for cell in some if cell["reduction"] != "-" and not is_usual(cell) and cell not in int8_averages(some)]
    sglang = lambda some: [cell for cell in some if "NCCL_CUMEM_ENABLE=0" in cell["head"]["variables"]]
    idle = [cell for cell in others if cell["head"]["company"] == "11 idle"]
    for text, some in (
        ("fp32, seven collectives | none", cells(folder + "alone")),
        ("fp32, five collectives | 8 idle communicators", [cell for cell in beside if cell["type"] == "float" and cell["reduction"] in ("sum", "-")]),
        ("fp16 and bf16: sums | none", [cell for cell in types if is_usual(cell)]),
        ("int8 and bf16: broadcasts, all-gathers | none", [cell for cell in types if cell["reduction"] == "-"]),
        ("other types; sums, maxima, products, averages | none", left(types)),
        ("other types; sums, maxima, averages | 8 idle communicators", left(beside)),
        ("fp32, collectives and messages | 11 idle communicators", [cell for cell in idle if cell not in sglang(idle)]),
        ("the same under SGLang's variables | 11 idle communicators", sglang(idle)),
        ("the same under SGLang's variables | 3 busy communicators", [cell for cell in others if cell["head"]["company"] == "3 busy"]),
    ):
        graph, eager = by_mode(some)
        yield PERFORMANCE, text + " | {}, {} | {}, {} | {} |", mean(graph), most(graph), mean(eager), most(eager), count(some)
    alone, company = (by_mode(int8_averages(some))[1] for some in (types, beside))
    yield (PERFORMANCE, "{} of {} eager cells alone, and {} of {} beside 8, take more than 1.02 of NCCL's time, up to {} and {}", count(above(alone)), count(alone),
           count(above(company)), count(company), most(alone), most(company))


def of_environments():
    company, before = (cells(f"2026-11-25-environments/{name}") for name in ("company", "before"))
    under = lambda some, variable: [cell for cell in some if variable in cell["head"]["variables"].split()]
    sglang, vllm = under(company, "CUDA_DEVICE_MAX_CONNECTIONS=8"), under(company, "NCCL_PROTO=Simple")
    of_company = lambda name: [cell for cell in vllm if cell["head"]["company"] == name]
    for text, some in (("SGLang | none", sglang), ("vLLM, batch-invariant | none", of_company("none")),
                       ("vLLM, batch-invariant | 11 idle", of_company("11 idle")), ("vLLM, batch-invariant | 3 busy", of_company("3 busy"))):
        yield PERFORMANCE, f"| {text} |" + " {} | {} | {} |", count(some), mean(some), most(some)
    few = {blocks: under(company, f"NCCL_MAX_CTAS={blocks}") for blocks in (1, 2, 4)}
    of_op = lambda op: [most([cell for cell in few[blocks] if cell["op"] == op]) for blocks in few]
    yield (PERFORMANCE, "one way {}, {} and {} at most, both ways {}, {} and {}", *of_op("send_one_way"), *of_op("send_both_ways"))
    earlier = lambda blocks, size: f"{next(cell['ratio'] for cell in under(before, f'NCCL_MAX_NCHANNELS={blocks}') if cell['mode'] == 'graph' and cell['bytes'] == size):.2f}"
    yield PERFORMANCE, "took {} of NCCL's time with 1 block, {} with 4 and {} with 8", *(earlier(blocks, 64 * MIB) for blocks in (1, 4, 8))
    yield ("crates/transport/src/tuning.rs", "1 block {} at 256 KiB, {} at 4 MiB; 4 blocks {} and {}; 8 blocks {} at 4 MiB, {} at 64 MiB", earlier(1, 256 * KIB),
           earlier(1, 4 * MIB), earlier(4, 256 * KIB), earlier(4, 4 * MIB), earlier(8, 4 * MIB), earlier(8, 64 * MIB))


def of_others():
    before = cells("2026-11-25-many-communicators/before")
    worst = f"{max(cell['ratio'] for cell in before):.1f}"
    yield PERFORMANCE, "calls beside 8 idle ones took up to {} of NCCL's time", worst
    yield "CHANGELOG.md", "beside 8 idle ones, calls took up to {} times NCCL's time", worst
    product = cells("2026-11-25-many-communicators/product")
    yield PERFORMANCE, "{} to {} in each of two runs of {} cells", *span(product), str(len(product) // 2)

    variants = cells("2026-11-26-crossovers/variants")
    usual = {table.place(cell): cell for cell in variants if cell["head"]["variant"] == "built in"}
    of_usual = lambda cell: cell["windlass_us"] / usual[table.place(cell)]["windlass_us"]
    sizes = [cell for cell in variants if cell["head"]["variant"] not in ("built in", "32 blocks")]
    gain, loss = 1 - min(map(of_usual, sizes)), max(map(of_usual, sizes)) - 1
    yield COLLECTIVES, "gained {} % at most in {} cells, and lost up to {} %", f"{100 * gain:.0f}", count(sizes), f"{100 * loss:.0f}"
    wide = lambda op, size: f"{next(map(of_usual, cells('2026-11-26-crossovers/variants', op=op, variant='32 blocks', least=size, most=size))):.2f}"
    yield (COLLECTIVES, "all-reduces of 4 and 8 MiB took {} and {} of the time, and reduces of 64 MiB {}", wide("all_reduce", 4 * MIB), wide("all_reduce", 8 * MIB),
           wide("reduce", 64 * MIB))
    searched = "crates/cli/src/limits/search.rs"
    some = [cell for cell in usual.values() if cell["op"] == "reduce" and cell["bytes"] == 16 * MIB]
    yield searched, "{} with fp32 (2026-11-26-crossovers)", most(some)

    designs = "2026-11-26-other-types/designs"
    divided = f"{max(cell['ratio'] for cell in cells(designs, reduction='avg')):.1f}"
    yield COLLECTIVES, "that divided took up to {} of NCCL's time", divided
    yield "crates/kernels/src/collectives/reduction.rs", "that divided took up to {} of NCCL's time", divided
    of = lambda variant: short(cells(designs, op="all_reduce", type="int64", variant=variant, least=64 * MIB)[0]["windlass_us"])
    yield ("crates/kernels/README.md", "took {} us with three calls for each word, {} with a call for 16 bytes, and {} with a call for a packet", of("three calls a word"),
           of("a call for 16 bytes"), of("a call for a packet"))
    chosen = cells(designs, variant="a call for a packet")
    yield ("docs/reproducible-results.md", "fp64 sums take up to {} of NCCL's time and products of fp32 up to {}", most([cell for cell in chosen if cell["type"] == "double"]),
           most([cell for cell in chosen if cell["reduction"] == "prod"]))
    sums = [cell for cell in chosen if cell["op"] == "reduce" and cell["reduction"] == "sum" and cell["bytes"] == 4 * MIB]
    yield searched, "{} to {} with sums of integers and fp64 (2026-11-26-other-types)", *span(sums)


if __name__ == "__main__":
    sys.exit(main())
