"""Holds that NVIDIA's own libraries, the oldest and the newest, load under Windlass without a GPU and answer calls.
Programs compiled against Windlass's header run with them, and programs compiled against theirs run with Windlass."""

import subprocess
import sys

from scene import BUILD, PRELOAD, ROOT, WHEELS, check, check_quiet, done, run, scratch, skip

sys.path.insert(0, str(ROOT / "abi"))
import cuda_stubs  # noqa: E402
import fetch  # noqa: E402

VERSIONS = {"2.18.3": 21803, "2.32.3": 23203}


def compiled_against(header_folder, folder):
    """`ask`, compiled against the nccl.h in a folder."""
    program = folder / "ask"
    stubs = cuda_stubs.write(folder / "cuda")
    source = ROOT / "ctests" / "loader" / "ask.c"
    subprocess.run(["gcc", "-w", "-o", program, source, "-I", header_folder, "-isystem", stubs, "-ldl", "-lpthread",
                    BUILD / "libnccl_link_stub.so"], check=True)
    return program


if not WHEELS:
    skip("WHEEL_CACHE_DIR is not set")
for version, code in VERSIONS.items():
    package = fetch.fetch(version, WHEELS) / "nvidia" / "nccl"
    library = package / "lib" / "libnccl.so.2"
    words = ["version", "string:0", "string:4", "string:77"]
    plain = run(BUILD / "ask", *words, LD_LIBRARY_PATH=library.parent)
    check_quiet(plain, f"{version}, our header, the plain library")
    check(f"version 0 {code}" in plain.stdout, f"{version} answers {code}", plain)
    ours = run(BUILD / "ask", *words, LD_PRELOAD=PRELOAD, WINDLASS_NCCL=library)
    check_quiet(ours, f"{version} through Windlass")
    check(ours.stdout == plain.stdout, f"{version}: the same answers through Windlass", ours)
    with scratch() as folder:
        theirs = compiled_against(package / "include", folder)
        result = run(theirs, *words, LD_LIBRARY_PATH=PRELOAD.parent, WINDLASS_NCCL=library)
        check_quiet(result, f"{version}: a program compiled against NVIDIA's header runs with Windlass")
        check(result.stdout == plain.stdout, f"{version}: with the same answers", result)
done()
