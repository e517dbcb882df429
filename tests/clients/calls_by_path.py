"""Says what ran where: calls_by_path.py REPORT..., reports of processes (`WINDLASS_REPORT=json:FILE.%p`).

Ends with 1 if none counted a call.
"""

import json
import pathlib
import sys


def main():
    calls = {}
    for path in (path for path in map(pathlib.Path, sys.argv[1:]) if path.exists()):  # a pattern that fits none is its own name
        for line in path.read_text().splitlines():
            for counts in (counts for communicator in json.loads(line)["communicators"] for counts in communicator["calls"]):
                key = counts["function"], counts["path"]
                calls[key] = calls.get(key, 0) + counts["calls"]
    for (function, path), count in sorted(calls.items()):
        print(f"{function} {path} {count}")
    on = {}
    for (_, path), count in calls.items():
        on[path] = on.get(path, 0) + count
    print("calls: " + (", ".join(f"{path} {count}" for path, count in sorted(on.items())) or "none"))
    sys.exit(0 if calls else 1)


if __name__ == "__main__":
    main()
