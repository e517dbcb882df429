"""Holds that examples which need GPUs name what is missing, and that those which start another program start it as they
say. Python has no packages here, and the other programs are scripts that print their arguments and variables."""

import ast
import os
import pathlib
import shutil
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "loader"))
from scene import ROOT, check, done, run, scratch  # noqa: E402

EXAMPLES = ROOT / "examples"
PYTHON = [sys.executable, "-S", "-E"]  # -S: without the packages that are installed here
STAND_IN = """#!/usr/bin/env bash
echo "$(basename "$0") $*"
env | grep -E '^(NCCL|VLLM|WINDLASS|PYTORCH)_' | sort
"""


def check_python(name, missing, *options):
    script = EXAMPLES / "python" / name
    ast.parse(script.read_text(), script)
    helped = run(*PYTHON, script, "--help")
    shows_all = all(option in helped.stdout for option in options)
    check(helped.returncode == 0 and shows_all, f"{name} --help names its options", helped)
    lacking = run(*PYTHON, script)
    said = lacking.returncode == 1 and lacking.stderr.startswith(missing) and lacking.stderr.count("\n") == 1
    check(said, f"{name} says that {missing}", lacking)
    refused = run(*PYTHON, script, options[0], "x")
    check(refused.returncode == 2 and options[0] in refused.stderr, f"{name} refuses {options[0]} x", refused)


def check_launcher(path, folder, needed, words, expected, *variables):
    """Runs a launcher without arguments, without the programs that it starts, and with both."""
    launcher = EXAMPLES / path
    tools = folder / "tools"  # no program but these: what the machine has installed does not count
    tools.mkdir()
    for tool in ("bash", "env", "sed", "basename", "sort", "grep"):
        (tools / tool).symlink_to(shutil.which(tool))
    usage = run(launcher, PATH=tools)
    check(usage.returncode == 2 and usage.stderr.count("\n") == 3, f"{path} without words tells its usage", usage)
    lacking = run(launcher, *words, PATH=tools)
    check(lacking.returncode == 1 and "windlass is not in PATH" in lacking.stderr, f"{path} says what is missing", lacking)
    for program in ("windlass", needed):
        (tools / program).write_text(STAND_IN)
        os.chmod(tools / program, 0o755)
    started = run(launcher, *words, PATH=tools)
    lines = started.stdout.splitlines()
    check(started.returncode == 0 and lines[:1] == [expected], f"{path} starts: {expected}", started)
    check(set(variables) <= set(lines), f"{path} sets {' '.join(variables)}", started)


check_python("ddp.py", "PyTorch is missing", "--steps")
check_python("decode.py", "PyTorch is missing", "--layers")
check_python("fixed_order.py", "PyTorch is missing", "--layers", "--hidden", "--tokens", "--requests", "--expect-differences")
check_python("mem_pool.py", "PyTorch is missing", "--rounds")
check_python("jax_psum.py", "JAX is missing", "--rounds", "--count", "--ranks")

with scratch() as folder:
    check_launcher("vllm/serve", folder, "vllm", ["a/model", "--port", "1"],
                   "windlass run -- vllm serve a/model --tensor-parallel-size 2 --disable-custom-all-reduce --compilation-config "
                   '{"pass_config": {"fuse_allreduce_rms": false}} --port 1',
                   "VLLM_ALLREDUCE_USE_FLASHINFER=0", "VLLM_ALLREDUCE_USE_SYMM_MEM=0",
                   "WINDLASS_REPORT=text:windlass-%p.txt")

TORCHRUN = ("windlass run -- torchrun --nproc_per_node 2 --rdzv_backend c10d --rdzv_endpoint localhost:0 --local-ranks-filter 0 --role rank "
            "--tee 3 -m torchtitan.train")
OF_TORCHTITAN = ["PYTORCH_ALLOC_CONF=expandable_segments:True", "WINDLASS_REPORT=text:windlass-%p.txt"]

with scratch() as folder:
    (folder / "new" / "torchtitan" / "models" / "llama3").mkdir(parents=True)
    check_launcher("torchtitan/train", folder, "torchrun", [folder / "new", "--training.steps", "20"],
                   f"{TORCHRUN} --module llama3 --config llama3_debugmodel --training.steps 20", *OF_TORCHTITAN)

with scratch() as folder:
    settings = folder / "old" / "torchtitan" / "models" / "llama3" / "train_configs" / "debug_model.toml"
    settings.parent.mkdir(parents=True)
    settings.touch()
    check_launcher("torchtitan/train", folder, "torchrun", [folder / "old"],
                   f"{TORCHRUN} --job.config_file torchtitan/models/llama3/train_configs/debug_model.toml", *OF_TORCHTITAN)
done()
