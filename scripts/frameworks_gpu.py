"""Runs programs of frameworks with NCCL and with Windlass, on two GPUs: `scripts/frameworks --gpu [NAME...]`.

For each: the share of calls in Windlass's kernels, the time with and without, and whether the results are equal. What is not installed here is
one line `skipped`. A program prints `time MS` and `result TEXT`, on rank 0. NVLink multicast stays off.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "scripts" / "frameworks.programs"
# Program, what it imports, and whether torchrun starts its ranks.
FRAMEWORKS = {
    "vllm": ("vllm", False),
    "sglang": ("sglang", True),
    "transformers": ("transformers", True),
    "megatron": ("megatron.core", True),
    "deepspeed": ("deepspeed", True),
    "lightning": ("lightning", False),
}
LIMIT = int(os.environ.get("LIMIT", "240"))


def has(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def command(name, is_started):
    if name == "vllm":
        return [sys.executable, ROOT / "examples/vllm/decode.py", "--layers", "2", "--batches", "8", "--prefills"]
    program = PROGRAMS / f"{name}.py"
    return ["torchrun", "--nproc-per-node", "2", program] if is_started else [sys.executable, program]


def run(command, **more):
    """Its time in ms and its result, or why there is none."""
    environment = {**os.environ, "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", **more}
    try:
        done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return None, f"not over after {LIMIT} s"
    # decode.py of vLLM has a line for each of its times.
    time = re.search(r"^time (\S+)|: (\d+\.\d+) ms", done.stdout, re.M)
    result = re.search(r"^result (.*)|tokens (.*)", done.stdout, re.M)
    if done.returncode or not (time and result):
        return None, f"exit {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing said'])[-1][:160]}"
    return float(time[1] or time[2]), result[1] or result[2]


def share(reports):
    """The part of calls in Windlass's kernels, by the processes' reports."""
    on = {}
    for file in reports:
        for line in file.read_text().splitlines():
            for counts in (counts for communicator in json.loads(line)["communicators"] for counts in communicator["calls"]):
                on[counts["path"]] = on.get(counts["path"], 0) + counts["calls"]
    ours = on.get("native", 0) + on.get("p2p", 0)
    return f"{100 * ours / sum(on.values()):.0f} % of {sum(on.values())} calls" if on else "no report"


def compare(name):
    module, is_started = FRAMEWORKS[name]
    if not has(module):
        return f"{name}: skipped: {module} is not installed"
    if name == "vllm":
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # forked workers write no report
    alone = run(command(name, is_started))
    with tempfile.TemporaryDirectory() as folder:
        windlass = Path(os.environ["BUILT"]) / "windlass" if "BUILT" in os.environ else "windlass"
        ours = run([windlass, "run", "--quiet", "--", *command(name, is_started)], WINDLASS_REPORT=f"json:{folder}/%p")
        part = share(Path(folder).iterdir())
    for words, (time, result) in [("NCCL", alone), ("Windlass", ours)]:
        if time is None:
            return f"{name}: failed with {words}: {result}"
    equal = "equal" if alone[1] == ours[1] else f"different: {alone[1]} and {ours[1]}"
    return f"{name}: {alone[0]:.3f} ms with NCCL, {ours[0]:.3f} ms with Windlass, {part} in Windlass's kernels, results {equal}"


def main(names):
    unknown = [name for name in names if name not in FRAMEWORKS]
    if unknown:
        sys.exit(f"{unknown[0]!r} is no framework here, expected some of {', '.join(FRAMEWORKS)}")
    gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.count("GPU ") if shutil.which("nvidia-smi") else 0
    has_failed = False
    for name in names or FRAMEWORKS:
        line = f"{name}: skipped: {gpus} GPUs, expected two or more" if gpus < 2 else compare(name)
        print(line, flush=True)
        has_failed |= "failed" in line
    return has_failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
