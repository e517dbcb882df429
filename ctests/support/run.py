#!/usr/bin/env python3
"""Runs one test program over the real library (or its simulator), on NCCL alone or through Windlass.

    run.py --out DIR --nccl LIBRARY [--windlass DIR [--peers REASONS] [--served PATH] [--most PATH=CALLS] [--just PATH=CALLS] [--unordered CALLS] [--recorded] [--lacking FEATURE] [--logged TEXT] [--told TEXT] [--lazy WAYS] [--unbuilt]
           [--reused] [--limits SOURCES]] [--cuda DIR] [--gpu] -- PROGRAM [ARGUMENT...]

The program's standard output is kept in DIR/output.txt. Through Windlass its reports are kept, too, and must have every
call that the program counted, exactly as often: a test that never reached Windlass proves nothing. What else they must have:

    --peers        (WINDLASS_PEER_GROUPS=on, else off; libcuda's simulator is strict about leaks) of communicators exactly REASONS:
                   "yes", or why there is no peer group, separated by semicolons; with a ? one that may be missing
    --served       some calls on the path; --most PATH=CALLS at most so many; --just PATH=CALLS exactly so many
    --unordered    exactly so many reductions that were not in fixed order
    --recorded     some calls that a graph capture recorded
    --lacking      of each peer group that it lacks the feature
    --logged       a line of a log with this text
    --told         of Windlass's own lines on standard error only such with this text; "nothing" for none
    --lazy         of lazy communicators exactly these WAYS; "none" if there are none
    --unbuilt      (WINDLASS_FIRST_LAUNCH_GUARD=off) as many communicators that NCCL never built as the program stated
                   (support/team.h); some, if it stated nothing
    --reused       (as above) as many that reused a cached communicator as the program stated; none with WINDLASS_CACHE_MAX=0
    --limits       of where the limits of native collectives come from exactly SOURCES, in the form of --peers
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ENTRY_POINTS = pathlib.Path(__file__).resolve().parents[2] / "crates" / "nccl-sys" / "src" / "table.rs"


def main():
    options = read_options()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    output = options.out / "output.txt"
    with output.open("w") as file:  # as it comes: of a run that is ended from outside, too
        try:
            with Hosts() if options.hosts else contextlib.nullcontext({}) as of_hosts:
                with (options.out / "error.txt").open("w") as errors:
                    result = subprocess.run(options.command, env=environment(options) | of_hosts, stdout=file, stderr=errors)
        except NoHosts as error:
            print(f"no hosts can be made here: {error}", file=sys.stderr)
            print("skipped: no hosts", file=file)  # what is compared with it is skipped, too
            sys.exit(77)
    sys.stdout.write(output.read_text())
    sys.stderr.write((options.out / "error.txt").read_text(errors="replace"))
    if result.returncode:
        sys.exit(result.returncode if result.returncode > 0 else 1)
    if options.windlass:
        wrong = [uncounted(options.out), options.peers and not met(options), options.served and not served(options),
                 options.most and not within(options), options.just and not just(options), options.logged and not logged(options),
                 options.told and not told(options),
                 options.unordered is not None and not unordered(options), options.recorded and not recorded(options),
                 options.lacking and not lacking(options),
                 options.lazy and not lazy(options), options.unbuilt and not unbuilt(options),
                 options.reused and not reused(options), options.limits and not limits(options)]
        sys.exit(1 if any(wrong) else 0)


def read_options():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=pathlib.Path, required=True, help="folder of what the run leaves")
    arguments.add_argument("--nccl", type=pathlib.Path, required=True, help="the real libnccl.so.2 or the simulator")
    arguments.add_argument("--windlass", type=pathlib.Path, help="folder with Windlass as libnccl.so.2")
    arguments.add_argument("--peers", metavar="REASONS", help="with WINDLASS_PEER_GROUPS=on, and what reports must say then; with a ? what they may say")
    arguments.add_argument("--served", metavar="PATH", help="a path on which some calls must have run")
    arguments.add_argument("--most", metavar="PATH=CALLS", help="a path on which no more calls may have run")
    arguments.add_argument("--just", metavar="PATH=CALLS", help="a path on which so many calls must have run")
    arguments.add_argument("--unordered", metavar="CALLS", type=int, help="how many reductions must not have been in fixed order")
    arguments.add_argument("--recorded", action="store_true", help="a graph capture must have recorded some calls")
    arguments.add_argument("--lacking", metavar="FEATURE", help="what each peer group must lack")
    arguments.add_argument("--logged", metavar="TEXT", help="what a line of a log must have")
    arguments.add_argument("--told", metavar="TEXT", help="what Windlass's lines on standard error must have, or 'nothing'")
    arguments.add_argument("--lazy", metavar="WAYS", help="how NCCL's lazy communicators must have come to be: unbuilt, built, reused, apart by commas; or none")
    arguments.add_argument("--unbuilt", action="store_true", help="how many communicators NCCL never builds is stated by the program")
    arguments.add_argument("--reused", action="store_true", help="how many use NCCL's communicator of an ended one is stated by the program")
    arguments.add_argument("--limits", metavar="SOURCES", help="what reports must say of where limits of native collectives come from, as 'built in,cache'; with a ? what they may say")
    arguments.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="a variable of ours")
    arguments.add_argument("--hosts", action="store_true", help="the first half of the ranks on another host than the others, as the network has it; status 77 where that takes more rights")
    arguments.add_argument("--cuda", type=pathlib.Path, help="folder with the simulated libcuda.so.1")
    arguments.add_argument("--gpu", action="store_true", help="on real GPUs")
    arguments.add_argument("command", nargs="+")
    return arguments.parse_args()


def environment(options):
    """The program's environment. Variables of Windlass that the caller has set are left out, but those of the simulator."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith("WINDLASS_") or name.startswith("WINDLASS_SIM_")}
    first = options.windlass or options.nccl.parent
    one_gpu = kept.get("CTESTS_ONE_GPU") if options.gpu else None
    folders = [str(folder) for folder in (first, options.cuda, one_gpu) if folder]
    before = [kept["LD_LIBRARY_PATH"]] if kept.get("LD_LIBRARY_PATH") else []
    kept["LD_LIBRARY_PATH"] = ":".join(folders + before)
    kept["CTESTS_NCCL"] = str(first / "libnccl.so.2")
    kept["CTESTS_CALLS"] = str(options.out / "calls.txt")
    kept["CTESTS_MACHINE"] = "gpu" if options.gpu else "sim"
    if options.gpu:
        kept["NCCL_NVLS_ENABLE"] = "0"  # NVLink multicast is never asked for on the machines we test on
        if one_gpu:
            kept["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        ranks = dict(pair.split("=", 1) for pair in options.set).get("CTESTS_RANKS", "4")
        kept.setdefault("WINDLASS_SIM_DEVICES", str(max(4, int(ranks))))
    if options.windlass:
        kept["WINDLASS_NCCL"] = str(options.nccl)
        kept["WINDLASS_CACHE"] = "off"  # the limits that tests expect, whatever was measured on this machine
        kept["WINDLASS_REPORT"] = f"json:{options.out}/report-%p.json"
    if options.windlass:
        kept["WINDLASS_PEER_GROUPS"] = "on" if options.peers else "off"
    if options.peers:
        kept["WINDLASS_SIM_STRICT"] = "1"
    if options.unbuilt or options.reused:
        kept["WINDLASS_FIRST_LAUNCH_GUARD"] = "off"
    kept.update(pair.split("=", 1) for pair in options.set)
    if options.windlass and not {"WINDLASS_LOG", "WINDLASS_LOG_FILE"} & set(kept):
        # Says why, if the reports are wrong.
        kept["WINDLASS_LOG"] = "info"
        kept["WINDLASS_LOG_FILE"] = f"{options.out}/log-%p.txt"
    return kept


class NoHosts(Exception):
    """This machine has no `ip`, or refuses to make network namespaces."""


class Hosts:
    """Two network namespaces that reach each other as hosts do, and the variables that name them to the ranks."""

    def __enter__(self):
        self.names = [f"ctests-{os.getpid()}-{host}" for host in range(2)]
        pair = [f"ct{os.getpid()}{side}" for side in "ab"]
        addresses = ["10.199.77.1", "10.199.77.2"]
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip("link", "add", pair[0], "netns", self.names[0], "type", "veth", "peer", "name", pair[1], "netns", self.names[1])
            for name, link, address in zip(self.names, pair, addresses):
                ip("-n", name, "address", "add", f"{address}/30", "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            raise NoHosts(error) from error
        return {"CTESTS_HOSTS": ":".join(f"/run/netns/{name}" for name in self.names),
                "WINDLASS_SIM_ADDRESSES": ",".join(addresses)}

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def ip(*words):
    subprocess.run(["ip", *words], check=True, stderr=subprocess.PIPE, text=True)


def uncounted(out):
    """Whether the reports lack calls that the program made, or have more; prints which."""
    counted = out / "calls.txt"
    made = dict(line.split() for line in counted.read_text().splitlines()) if counted.exists() else {}
    reported = {}
    for path in sorted(out.glob("report-*.json")):
        for name, calls in json.loads(path.read_text())["functions"].items():
            reported[name] = reported.get(name, 0) + calls
    seen = seen_functions()
    wrong = {name: (int(calls), reported.get(name, 0)) for name, calls in made.items()
             if name in seen and int(calls) != reported.get(name, 0)}
    for name, (calls, seen_calls) in wrong.items():
        print(f"counters: {name} was called {calls} times, Windlass counted {seen_calls}", file=sys.stderr)
    checked = len([name for name in made if name in seen])
    print(f"counters: {checked} functions compared, {len(wrong)} wrong, {len(list(out.glob('report-*.json')))} reports",
          file=sys.stderr)
    if not counted.exists():
        # An example counts nothing itself: that Windlass counted anything is the proof.
        return not reported
    return bool(wrong)


def met(options):
    """Whether the reports say of all communicators just what was expected; prints what they say."""
    said = {}
    for path in options.out.glob("report-*.json"):
        for communicator in json.loads(path.read_text())["communicators"]:
            if communicator["serial"]:
                text = communicator.get("peer_group", "")
                said[text] = said.get(text, 0) + 1
    print(f"peer groups: {said}", file=sys.stderr)
    is_right = is_as_expected(said, options.peers)
    if not is_right:
        # A line for each communicator that has none.
        for path in options.out.glob("log-*.txt"):
            for line in [line for line in path.read_text().splitlines() if " is on NCCL: " in line][:10]:
                print(line, file=sys.stderr)
    return is_right


def served(options):
    """Whether the reports count calls on the path that was expected; prints how many ran on each."""
    ran = calls_by_path(options)
    print(f"paths: {ran}", file=sys.stderr)
    return ran.get(options.served, 0) > 0


def within(options):
    """Whether the reports count no more calls on a path than it may have; prints how many."""
    path, most = options.most.split("=", 1)
    ran = calls_by_path(options).get(path, 0)
    print(f"{path}: {ran} calls, {most} at most", file=sys.stderr)
    return ran <= int(most)


def just(options):
    """Whether the reports count just as many calls on a path as it must have; prints how many."""
    path, wanted = options.just.split("=", 1)
    ran = calls_by_path(options).get(path, 0)
    print(f"{path}: {ran} calls, {wanted} expected", file=sys.stderr)
    return ran == int(wanted)


def told(options):
    """Whether what Windlass told the user has the text."""
    lines = [line for line in (options.out / "error.txt").read_text(errors="replace").splitlines() if line.startswith("windlass: ")]
    return not lines if options.told == "nothing" else lines and all(options.told in line for line in lines)


def logged(options):
    """Whether a log has a line with the text; prints how many have."""
    lines = [line for path in options.out.glob("log-*.txt") for line in path.read_text().splitlines() if options.logged in line]
    print(f"logged: {len(lines)} lines, {lines[:1]}", file=sys.stderr)
    return bool(lines)


def unordered(options):
    """Whether the reports count just as many reductions that were not in fixed order; prints how many."""
    reports = [json.loads(path.read_text()) for path in options.out.glob("report-*.json")]
    seen = sum(communicator.get("not_in_fixed_order", 0) for report in reports for communicator in report["communicators"])
    print(f"not in fixed order: {seen} calls, {options.unordered} expected", file=sys.stderr)
    return seen == options.unordered


def recorded(options):
    """Whether the reports count calls that a graph capture recorded; prints how many."""
    reports = [json.loads(path.read_text()) for path in options.out.glob("report-*.json")]
    seen = sum(communicator.get("recorded", 0) for report in reports for communicator in report["communicators"])
    print(f"recorded: {seen} calls", file=sys.stderr)
    return seen > 0


def lacking(options):
    """Whether the reports say of each peer group that it lacks the feature; prints what each lacks."""
    reports = [json.loads(path.read_text()) for path in options.out.glob("report-*.json")]
    lacks = [communicator.get("lacks", {}) for report in reports for communicator in report["communicators"] if communicator["serial"]]
    print(f"lacks: {lacks}", file=sys.stderr)
    return bool(lacks) and all(options.lacking in one for one in lacks)


def calls_by_path(options):
    """How many calls ran on each path, in all reports."""
    ran = {}
    for path in options.out.glob("report-*.json"):
        for communicator in json.loads(path.read_text())["communicators"]:
            for calls in communicator.get("calls", []):
                ran[calls["path"]] = ran.get(calls["path"], 0) + calls["calls"]
    return ran


def lazy(options):
    """Whether the reports say just these ways of all lazy communicators; prints how many of each there are."""
    said = {}
    for path in options.out.glob("report-*.json"):
        for communicator in json.loads(path.read_text())["communicators"]:
            way = communicator.get("nccl")
            if way:
                said[way] = said.get(way, 0) + 1
    print(f"lazy: {said}", file=sys.stderr)
    return set(said) == set(options.lazy.split(",")) - {"none"}


def reused(options):
    """Whether the reports say of as many communicators as the program expects that they were used again; prints how many."""
    counted = dict(line.split() for line in (options.out / "calls.txt").read_text().splitlines())
    expected = 0 if "WINDLASS_CACHE_MAX=0" in options.set else int(counted.get("reused", 0))
    seen = cached = 0
    for path in options.out.glob("report-*.json"):
        report = json.loads(path.read_text())
        cached += report["cached"]
        seen += sum(communicator.get("nccl") == "reused" for communicator in report["communicators"])
    print(f"reused: {seen}, expected {expected}; {cached} cached at the end", file=sys.stderr)
    return seen == expected and (cached > 0) == (expected > 0)


def limits(options):
    """Whether the reports say just what was expected of where limits come from; prints how many say what."""
    said = {}
    for path in options.out.glob("report-*.json"):
        for communicator in json.loads(path.read_text())["communicators"]:
            sources = ",".join(communicator.get("limits_from", []))
            if sources:
                said[sources] = said.get(sources, 0) + 1
    print(f"limits from: {said}", file=sys.stderr)
    return is_as_expected(said, options.limits)


def is_as_expected(said, expected):
    """Whether all that had to be said was, and nothing but what might be: parts with a ?."""
    parts = expected.split(";")
    needed = {text for text in parts if not text.endswith("?")}
    return needed <= set(said) <= {text.removesuffix("?") for text in parts}


def unbuilt(options):
    """Whether the reports say of as many communicators as the program expects that NCCL never built them; prints how many."""
    counted = options.out / "calls.txt"
    lazy = dict(pair.split("=", 1) for pair in options.set).get("WINDLASS_LAZY", "pairs")
    least = perhaps = expected = 0
    for name, count in (line.split() for line in counted.read_text().splitlines()):
        kind, _, rest = name.partition("/")
        if kind != "lazy":
            continue
        ranks, build = rest.split("/")
        expected += int(count)
        if lazy == "all" or lazy == "pairs" and ranks == "2":
            least += int(count) if build == "unbuilt" else 0
            perhaps += int(count) if build == "either" else 0
    said = {}
    for path in options.out.glob("report-*.json"):
        for communicator in json.loads(path.read_text())["communicators"]:
            if communicator["serial"]:
                text = communicator.get("nccl", "unsaid")
                said[text] = said.get(text, 0) + 1
    print(f"lazy: {said}, expected unbuilt {least} to {least + perhaps} of {expected}", file=sys.stderr)
    seen = said.get("unbuilt", 0)
    return least <= seen <= least + perhaps if expected else any(text != "unsaid" for text in said)


def seen_functions():
    """Names of the entry points that the ABI layer counts: those of role `seen` in the table."""
    return set(re.findall(r"\[\d+ seen\] fn (\w+)", ENTRY_POINTS.read_text()))


if __name__ == "__main__":
    main()
