"""SGLang's PyNccl on a thread that has no CUDA context: an all-reduce of known values, then its time."""

import os
import sys
import threading
import time

# This file has the package's name, and Python would find it first.
sys.path.pop(0)
import torch
import torch.distributed as dist


def work(failures):
    try:
        from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator

        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        communicator = PyNcclCommunicator(group=dist.group.WORLD, device=device)
        torch.cuda.set_device(device)
        tensor = torch.full((1 << 16,), float(dist.get_rank() + 1), dtype=torch.bfloat16, device=device)
        with communicator.change_state(enable=True):
            communicator.all_reduce(tensor)
            result = tensor[0].item(), tensor.sum().item()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(1000):
                communicator.all_reduce(tensor)
            torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print("time", time.perf_counter() - began, flush=True)
            print("result", *result, flush=True)
    except Exception as error:
        failures.append(error)


dist.init_process_group("gloo")
found = []
thread = threading.Thread(target=work, args=(found,))
thread.start()
thread.join()
if found:
    raise found[0]
dist.destroy_process_group()
