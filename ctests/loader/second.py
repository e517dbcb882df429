"""Holds that Windlass warns of a second NCCL in a process, once in the log and by `windlass doctor` while the process
runs, and not of other libraries or of the NCCL that Windlass opened."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess

from scene import BUILD, PRELOAD, SIM, TOYS, check, copy, done, log_lines, run, scratch, skip

if not SIM:
    skip("no simulators")
REAL = pathlib.Path(os.path.realpath(SIM / "libnccl.so.2"))
DOCTOR = pathlib.Path(os.path.realpath(PRELOAD)).with_name("windlass")
WARNED = "a second NCCL is mapped"


def settings(**more):
    # The first pair must be lazy, too, so that communicators that are never destroyed leave nothing of NCCL behind.
    return dict(LD_PRELOAD=PRELOAD, WINDLASS_NCCL=REAL, LD_LIBRARY_PATH=SIM, WINDLASS_LOG="warn", WINDLASS_FIRST_LAUNCH_GUARD="off", **more)


def warnings(result):
    return [line for line in log_lines(result) if WARNED in line]


@contextlib.contextmanager
def held(*words, **variables):
    """`ask` with these words, which waits after the last of them."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("WINDLASS_", "CTESTS_", "LD_", "NCCL_"))}
    kept.update({name: str(value) for name, value in variables.items()})
    with subprocess.Popen([str(word) for word in (BUILD / "ask", *words, "hold")], env=kept, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        for line in process.stdout:
            if line == "hold\n":
                break
        yield process.pid
        process.stdin.close()


def doctor(process, *options):
    """The output of `windlass doctor` on a process: lines, or with --json its facts and findings."""
    result = run(DOCTOR, "doctor", "--nccl", REAL, *options, LD_LIBRARY_PATH=SIM)
    if "--json" not in options:
        return [line for line in result.stdout.splitlines() if f"process {process} " in line], result
    answer = json.loads(result.stdout)
    facts = [fact for fact in answer["facts"]["processes"] if fact["process"] == process]
    findings = [finding for finding in answer["findings"] if f"process {process} " in finding["what"]]
    return (facts, findings), result


with scratch() as folder:
    second = copy(REAL, folder / "second")
    renamed = pathlib.Path(shutil.copy(REAL, folder / "libother.so"))
    ours = copy(PRELOAD, folder / "ours")
    # As older linkers make libraries, with the other table of symbols.
    (folder / "old.c").write_text("int ncclCommInitRank(void) { return 0; }\nint pncclCommInitRank(void) { return 0; }\n")
    old = folder / "libold.so"
    run("cc", "-shared", "-fPIC", "-Wl,--hash-style=sysv", "-o", old, folder / "old.c").check_returncode()
    plugin = pathlib.Path(shutil.copy(BUILD / "toys/libshim.so", folder / "libnccl-net.so"))

    alone = run(BUILD / "ask", "init", "pair", "destroy", **settings())
    check(alone.stdout == "init 0\npair 0\ndestroy 0\n" and not warnings(alone), "one NCCL: no warning", alone)
    for library, what in ((second, "a copy under NCCL's name"), (renamed, "a copy under another name"), (old, "one of an older linker")):
        two = run(BUILD / "ask", f"dlopen:{library}", "init", "pair", "pair", "destroy", **settings())
        right = len(warnings(two)) == 1 and f"{library} beside {REAL}" in warnings(two)[0]
        check(right, f"{what}: one warning, which names both", two)
    late = run(BUILD / "ask", "init", f"dlopen:{second}", "pair", "destroy", **settings())
    check(len(warnings(late)) == 1, "mapped after the first communicator: one warning, at the first lazy communicator", late)
    others = run(BUILD / "ask", f"dlopen:{ours}", f"dlopen:{plugin}", f"dlopen:{REAL}", "init", "pair", "destroy", **settings())
    check(others.stdout.count("done") == 3 and not warnings(others),
          "a copy of Windlass, a plugin and the opened one again: no warning", others)
    quiet = run(BUILD / "ask", f"dlopen:{second}", "init", "pair", "destroy", **dict(settings(), WINDLASS_LOG="error"))
    check(not log_lines(quiet), "the log is silent unless it is asked for", quiet)

    with held(f"dlopen:{ours}", f"dlopen:{plugin}", "init", **settings()) as process:
        lines, said = doctor(process)
        check(not lines, "doctor says nothing of a process with one NCCL, a plugin and a copy of Windlass", said)
        (facts, findings), said = doctor(process, "--json")
        check(len(facts) == 1 and facts[0]["nccl"] == [str(REAL)] and not findings, "but its facts have it", said)
    for library in (second, renamed, old):
        # Mapped before the first communicator, and after all that the process asks for itself.
        for words in (f"dlopen:{library}", "init"), ("init", f"dlopen:{library}"):
            with held(*words, **settings()) as process:
                lines, said = doctor(process)
                right = len(lines) == 1 and f"{library} beside {REAL}" in lines[0] and "LIMITED" in lines[0]
                check(right and f"({BUILD / 'ask'}" in lines[0], f"doctor warns: {' '.join(words)}", said)
                (facts, findings), said = doctor(process, "--json")
                right = len(facts) == 1 and facts[0]["nccl"] == [str(REAL), str(library)]
                check(right and len(findings) == 1 and findings[0]["level"] == "limited", "and in JSON", said)
    with held(f"dlopen:{second}", "init", **settings()) as process:
        second.unlink()
        lines, said = doctor(process)
        check(len(lines) == 1 and str(second) in lines[0], "doctor warns of one whose file is gone", said)
    with held("version", f"dlopen:{renamed}", **dict(settings(), WINDLASS_NCCL=TOYS / "a")) as process:
        lines, said = doctor(process)
        check(not lines, "doctor does not know of a process without a communicator", said)
done()
