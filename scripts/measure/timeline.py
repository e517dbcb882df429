"""Draws traces in Chrome's format as one SVG: a row of calls and a row of device times for each process.

    scripts/measure/timeline.py OUT.svg TRACE.json...

The C tests' profiler plugin writes such traces (CTESTS_TRACE). Perfetto opens them too, and shows all of a trace; this draws the last --calls calls
of each process.
"""

import argparse
import json
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, LEFT, ROW, GAP = 960, 110, 26, 10
COLOURS = {"host": "#8a93a6", "device": "#2f7d4f"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--calls", type=int, default=4, help="so many calls [default: 4]")
    parser.add_argument("--title", default="", help="a line above")
    return parser.parse_args()


def main(chosen):
    ranks = []
    for trace in chosen.traces:
        events = [event for event in json.loads(trace.read_text()) if event["name"] != "group"]
        ranks.append((events[0]["args"]["rank"], {kind: [event for event in events if event["cat"] == kind] for kind in COLOURS}))
    ranks.sort(key=lambda rank: rank[0])
    # A call has an event of NCCL's interface and one of its collective on the host, and one on the device.
    begin = min(event["ts"] for _, rows in ranks for event in (rows["host"][-2 * chosen.calls], rows["device"][-chosen.calls]))
    end = max(event["ts"] + event["dur"] for _, rows in ranks for event in rows["device"]) + 10
    scale = (WIDTH - LEFT - GAP) / (end - begin)
    height = GAP * 4 + 2 * len(ranks) * (ROW + GAP) + 20
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{height}" fill="#fff"/><text x="{GAP}" y="18">{escape(chosen.title)}</text>']
    top = 2 * GAP + 10
    for rank, rows in ranks:
        for kind, colour in COLOURS.items():
            out.append(f'<text x="{GAP}" y="{top + 17}">rank {rank}, {"calls" if kind == "host" else "GPU"}</text>')
            for event in rows[kind]:
                if event["ts"] + event["dur"] < begin:
                    continue
                left = LEFT + max(event["ts"] - begin, 0) * scale
                width = max(LEFT + (event["ts"] + event["dur"] - begin) * scale - left, 1)
                words = f'{event["name"]} of {event["args"]["count"]}: {event["dur"]:.1f} us'
                out.append(f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" fill="{colour}"><title>{escape(words)}</title></rect>')
                if width > 7 * len(event["name"]):
                    out.append(f'<text x="{left + 4:.1f}" y="{top + 17}" fill="#fff">{escape(event["name"])}</text>')
            top += ROW + GAP
    step = next(step for step in (5, 10, 20, 50, 100, 200, 500, 1000, 5000, 10000) if (end - begin) / step <= 12)
    for tick in range(0, int(end - begin) + 1, step):
        x = LEFT + tick * scale
        out.append(f'<path d="M{x:.1f} {top}v4" stroke="#000"/><text x="{x:.1f}" y="{top + 18}" text-anchor="middle">{tick}</text>')
    out.append(f'<text x="{GAP}" y="{top + 18}">us</text></svg>')
    chosen.out.write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    main(arguments())
