#!/usr/bin/env python3
"""Runs one program under the variables that known programs set, and holds that Windlass does what the page says.

    environments.py --out DIR --nccl FILE --cuda DIR --windlass DIR PROGRAM

Each row runs on the simulator, on devices that say they have multicast, as usual machines do. Its results must be those without
Windlass, and its reports must agree with docs/environments.md, which is made from these runs (WINDLASS_BLESS=1).
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import typing

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "environments.md"


READ = "read only"
MEASURED = READ + "; `windlass bench` ran under these variables on 2 × H100 ([output](measurements/2026-11-25-environments))"


class Row(typing.NamedTuple):
    who: str
    variables: str
    source: str
    ran: str = READ  # what was seen of the program itself on GPUs
    late: str = ""  # set after the first NCCL call
    later: str = ""  # set after the first communicator


BATCH_INVARIANT = (
    "NCCL_LAUNCH_MODE=GROUP NCCL_COLLNET_ENABLE=0 NCCL_NVLS_ENABLE=0 NCCL_P2P_NET_DISABLE=1 NCCL_MIN_NCHANNELS=1 "
    "NCCL_MAX_NCHANNELS=1 NCCL_PROTO=Simple NCCL_NTHREADS=1 NCCL_SOCKET_NTHREADS=1 "
)
NONE_SET = "sets no variable of NCCL's by itself"
SGLANG = "NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 NCCL_GRAPH_REGISTER=0 CUDA_DEVICE_MAX_CONNECTIONS=8"

ROWS = [
    Row("vLLM 0.26.0 and 0.33.0", "", NONE_SET,
        ran="0.26.0: run on 2 × H100 and 2 × H200, all-reduces left to NCCL, 100 % of bytes in Windlass's kernels "
        "([output](measurements/2026-11-28-frameworks/vllm.txt)); 0.33.0: " + READ),
    Row("JAX 0.11.1", "", NONE_SET,
        ran="0.11: run on 4 × H200 with an early Windlass that left every call to NCCL "
            "([output](measurements/2026-11-20-pass-through/clients.txt)); no newer output"),
    Row("DeepSpeed 0.19.6; torchtitan 0.3.0", "", NONE_SET),
    Row("vLLM, `VLLM_BATCH_INVARIANT=1`", BATCH_INVARIANT + "NCCL_ALGO=ring,tree;allreduce:tree",
        "vllm/model_executor/determinism/batch_invariant.py", ran=MEASURED),
    Row("SGLang 0.5.23, more than one GPU", SGLANG, "sglang/srt/entrypoints/engine.py, arg_groups/parallel_hook.py", ran=MEASURED),
    Row("SGLang, `--enable-symm-mem`", SGLANG.replace("ENABLE=0", "ENABLE=1"), "sglang/srt/entrypoints/engine.py"),
    Row("SGLang, `--enable-deterministic-inference`",
        SGLANG + " NCCL_ALGO=allreduce:tree NCCL_MIN_NCHANNELS=8 NCCL_MAX_NCHANNELS=8", "sglang/srt/arg_groups/attention_hook.py"),
    Row("Megatron-LM core 0.20.0", "CUDA_DEVICE_MAX_CONNECTIONS=1", "examples/gpt3/train_gpt3_175b_distributed.sh"),
    Row("Megatron-LM, `--use-nccl-ub`", "CUDA_DEVICE_MAX_CONNECTIONS=1", "megatron/core/nccl_allocator.py",
        later="NCCL_NVLS_ENABLE=1"),
    Row("Megatron-LM, `--deterministic-mode`", "CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL_ALGO=Ring", "megatron/training/determinism.py"),
    Row("Megatron-Bridge, DeepSeek-V3 on B200",
        "CUDA_DEVICE_MAX_CONNECTIONS=32 NCCL_GRAPH_REGISTER=0 NCCL_NVLS_ENABLE=0",
        "megatron/bridge/perf_recipes/deepseek/b200/deepseek_v3.py at 067f987d"),
    Row("torchtitan, `debug.batch_invariant`", BATCH_INVARIANT + "NCCL_ALGO=allreduce:tree", "torchtitan/distributed/utils.py"),
    Row("verl 0.10.0.dev, rollout with vLLM", "NCCL_DEBUG=WARN NCCL_CUMEM_ENABLE=0", "verl/plugin/platform/platform_cuda.py"),
    Row("verl, rollout with SGLang",
        "NCCL_DEBUG=WARN NCCL_CUMEM_ENABLE=0 NCCL_NVLS_ENABLE=0 CUDA_DEVICE_MAX_CONNECTIONS=4",
        "verl/workers/rollout/sglang_rollout/sglang_rollout.py"),
    Row("verl, full determinism", "NCCL_DEBUG=WARN NCCL_DETERMINISTIC=1 NCCL_ALGO=Ring NCCL_PROTO=Simple", "verl/workers/engine/utils.py"),
    Row("TensorRT-LLM, two GPUs", "", "cpp/tensorrt_llm/common/opUtils.cpp: before its first init", late="NCCL_RUNTIME_CONNECT=0"),
    Row("PyTorch 2.11, deterministic algorithms", "", "ProcessGroupNCCL.cpp: in the process group's constructor",
        late="NCCL_ALGO=^NVLS",
        ran="run on 2 × H100 and 2 × H200 without this mode ([DDP](measurements/2026-11-26-compare), "
            "[DDP and FSDP2](measurements/2026-11-22-collectives/programs-2.txt)); the mode: " + READ),
]

HEAD = """# Under the variables that programs set

Programs set variables of NCCL's by themselves. This page says which parts of Windlass work under these variables. `ctests/support/environments.py`
runs a program of its own under the variables of every row, on simulated devices with multicast, and makes this page from the reports.
[NCCL's variables](nccl-variables.md) says why.

- **On GPUs** says whether this program was run through Windlass, and which release. *Read only* means that nobody ran it: its source was read
  for the variables. The columns behind it are the simulator's in every row.
- A row has the variables that the program sets without any flag of the user's, or with the one flag that the row names. Versions and files
  were read in August 2026, vLLM, SGLang and torchtitan in November.
- **yes** means that calls ran that way. Peer groups work in every row, and sends and receives run on Windlass's path.
- Lazy: NCCL builds its part of a communicator of two ranks when an all-reduce needs it, beside a receive that waits. The next communicator of
  the same ranks reuses that part.
- Native collectives are those that reach NCCL. vLLM and SGLang have all-reduces of their own, which come first and which Windlass does not see
  ([vLLM](vllm.md), [SGLang](sglang.md)). Up to which size: [limits](collectives.md#what-runs-where).
- `scripts/frameworks --gpu` ran small programs with NCCL and with Windlass on 2 × H200, 29 November 2026: transformers (tensor parallel), Megatron-core 0.19.2, Lightning and SGLang's PyNccl. Results were equal, with 99 or 100 % of calls in Windlass's kernels ([output](measurements/2026-11-28-frameworks/programs.txt)).
- The rows are without `WINDLASS_ORDER`. With `fixed` or `strict` native collectives are on in all of them, and reductions that round run there at
  every size, in one order: [reproducible results](reproducible-results.md#what-the-framework-must-do) has a row for each of these modes.

| program | variables | on GPUs | send/recv | native collectives | lazy | memory pool | kept windows | registration |
|---|---|---|---|---|---|---|---|---|
"""


def arguments():
    parser = argparse.ArgumentParser()
    for name in ("out", "nccl", "cuda", "windlass"):
        parser.add_argument(f"--{name}", type=pathlib.Path, required=True)
    parser.add_argument("program", type=pathlib.Path)
    return parser.parse_args()


def run(options, out, row, windlass, in_order=False):
    """The digests of all ranks' results under a row's variables."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    command = [sys.executable, HERE / "run.py", "--out", out, "--nccl", options.nccl, "--cuda", options.cuda]
    variables = row.variables.split() + ["WINDLASS_SIM_MULTICAST=1"]
    variables += ["WINDLASS_ORDER=strict"] * in_order
    variables += [f"CTESTS_LATE={row.late}"] * bool(row.late) + [f"CTESTS_LATER={row.later}"] * bool(row.later)
    if windlass:
        command += ["--windlass", options.windlass, "--peers", "yes", "--served", "p2p"]
    for variable in variables:
        command += ["--set", variable]
    ended = subprocess.run([*command, "--", options.program], capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"{row.who}: status {ended.returncode}\n{ended.stdout}{ended.stderr}")
    # How many checks there were depends on the variables: without cuMem there are no windows to end.
    return [line for line in (out / "output.txt").read_text().splitlines() if "digest" in line]


def cells(out):
    """The columns of the page, from the reports on the communicators of all ranks."""
    reports = [json.loads(path.read_text()) for path in sorted(out.glob("report-*.json"))]
    communicators = [communicator for report in reports for communicator in report["communicators"] if communicator["serial"]]
    paths = {calls["path"] for communicator in communicators for calls in communicator["calls"]}
    lacks = {}
    for communicator in communicators:
        if communicator["ranks"] > 2:
            lacks.update(communicator.get("lacks", {}))

    def said(has, feature):
        # Only a feature that is missing has a reason.
        if has == (feature in lacks):
            sys.exit(f"{out}: {feature} ran: {has}; its reports say: {lacks}")
        return "yes" if has else f"no: {lacks[feature]}"

    def counted(group, name):
        return sum(report.get(group, {}).get(name, 0) for report in reports) > 0

    lazy = {communicator.get("nccl") for communicator in communicators if communicator["ranks"] == 2}
    return [
        "yes" if "p2p" in paths else "no",
        said("native" in paths, "native collectives"),
        "yes" if lazy == {"built", "reused"} else "no",
        "yes" if counted("pool", "hits") else "no",
        said(counted("windows", "hits"), "kept windows"),
        said(counted("registrations", "registered"), "registration"),
    ]


def main():
    options = arguments()
    lines = []
    # Without Windlass no variable here changes a result.
    alone = run(options, options.out / "nccl", Row("without Windlass", "", ""), windlass=False)
    for number, row in enumerate(ROWS):
        with_windlass = run(options, options.out / f"{number}", row, windlass=True)
        if alone != with_windlass:
            sys.exit(f"{row.who}: other results with Windlass\n{alone}\n{with_windlass}")
        said = cells(options.out / str(number))
        if said[1] != "yes":
            # WINDLASS_ORDER=strict would refuse another order.
            in_order = run(options, options.out / f"{number}-in-order", row, windlass=True, in_order=True)
            if alone != in_order or cells(options.out / f"{number}-in-order")[1] != "yes":
                sys.exit(f"{row.who}: in fixed order\n{alone}\n{in_order}")
        variables = row.variables.split()
        shown = [f"`{variable}`" for variable in variables]
        shown += [f"`{row.late}` after the first call"] * bool(row.late) + [f"`{row.later}` after the first init"] * bool(row.later)
        who = f"{row.who} ({row.source})"
        lines.append(f"| {who} | {' '.join(shown) or 'none'} | {row.ran} | {' | '.join(said)} |\n")
    page = HEAD + "".join(lines)
    if os.environ.get("WINDLASS_BLESS"):
        PAGE.write_text(page)
    if not PAGE.exists() or PAGE.read_text() != page:
        sys.exit(f"{PAGE} is stale, set WINDLASS_BLESS=1 to write it; these runs say:\n{page}")


main()
