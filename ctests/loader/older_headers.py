"""Holds that programs compiled against NVIDIA's older headers, whose structures are smaller, print the same through
Windlass as without it."""

import subprocess
import sys

from scene import BUILD, ROOT, SIM, WHEELS, WINDLASS, check, done, run, scratch, skip

sys.path.insert(0, str(ROOT / "abi"))
import cuda_stubs  # noqa: E402
import fetch  # noqa: E402

CTESTS = ROOT / "ctests"
SUPPORT = [CTESTS / "support" / f"{name}.c" for name in ("harness", "reference", "collective", "one_thread")]

if not (WHEELS and SIM):
    skip("WHEEL_CACHE_DIR or SIM_DIR is not set")
for version in ["2.28.9"]:
    headers = fetch.fetch(version, WHEELS) / "nvidia" / "nccl" / "include"
    for name in ["lifecycle", "nonblocking", "registration"]:
        with scratch() as folder:
            program = folder / name
            subprocess.run(["gcc", "-w", "-o", program, CTESTS / "programs" / f"{name}.c", *SUPPORT, "-I", headers,
                            "-isystem", cuda_stubs.write(folder / "cuda"), BUILD / "libnccl_link_stub.so",
                            BUILD / "libcuda_link_stub.so", "-lpthread", "-ldl"], check=True)
            runner = [sys.executable, CTESTS / "support" / "run.py", "--nccl", SIM / "libnccl.so.2", "--cuda", SIM]
            alone = run(*runner, "--out", folder / "nccl", "--", program)
            ours = run(*runner, "--out", folder / "windlass", "--windlass", WINDLASS, "--", program)
            check(alone.returncode == 0, f"{name} with the header of {version}, on NCCL alone", alone)
            check(ours.returncode == 0, f"{name} with the header of {version}, through Windlass", ours)
            check(ours.stdout == alone.stdout, "and the same output", ours)
done()
