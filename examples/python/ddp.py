r"""PyTorch data-parallel training, one process a GPU:

    NCCL_NVLS_ENABLE=0 WINDLASS_REPORT=text windlass run -- torchrun --nproc-per-node 2 ddp.py

Nothing here is Windlass's own: the script is written for NCCL. It does not run on the simulator: PyTorch computes on GPUs.

Did it work? Rank 0 prints "weights equal: True". At the end every process prints a report. Path native says that Windlass's kernel
summed the gradients, path forward that NCCL did:

    ncclAllReduce                  native

With more steps (--steps 100000), "windlass stats" in another terminal shows a line for each process while they train.

Does it help? Rank 0 prints the mean time of every 20 steps, which "windlass compare" reads:

    windlass compare --metric 'step (\S+) ms' --metric-warmup 5 -- torchrun --nproc-per-node 2 ddp.py --steps 400 --width 4096
"""

import argparse
import os
import time

try:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
except ImportError:
    torch = None  # read_options says so


TIMED = 20  # steps between two synchronizations


def main():
    options = read_options()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 1))
    model = DistributedDataParallel(model.to(device), device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    torch.manual_seed(1 + dist.get_rank())  # every rank its own data
    began = time.perf_counter()
    for step in range(1, options.steps + 1):
        inputs = torch.randn(64, 256, device=device)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # gradients are all-reduced here
        optimizer.step()
        if step % TIMED == 0:
            torch.cuda.synchronize()
            now = time.perf_counter()
            if dist.get_rank() == 0:
                print(f"step {(now - began) / TIMED * 1e3:.3f} ms")
            began = now

    # All ranks hold the same weights, whatever their data was.
    total = torch.stack([parameter.double().sum() for parameter in model.parameters()]).sum()
    lowest, highest = total.clone(), total.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    equal = bool(lowest == highest)
    if dist.get_rank() == 0:
        print(f"{options.steps} steps on {dist.get_world_size()} GPUs, weights equal: {equal}")
    dist.destroy_process_group()
    return not equal


def read_options():
    """What the command line says; ends the program where the script cannot run."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--steps", type=int, default=20, help="steps of training [default: 20]")
    arguments.add_argument("--width", type=int, default=1024, help="elements of the hidden layer [default: 1024]")
    options = arguments.parse_args()
    if torch is None:
        arguments.exit(1, "PyTorch is missing: pip install torch\n")
    if "LOCAL_RANK" not in os.environ:
        arguments.exit(1, "no LOCAL_RANK: start it with torchrun --nproc-per-node 2\n")
    if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        arguments.exit(1, f"a GPU is needed for each process, and PyTorch sees {torch.cuda.device_count()}\n")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
