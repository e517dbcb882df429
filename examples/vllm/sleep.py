#!/usr/bin/env python3
"""Puts an engine of vLLM to sleep together with its communicators, as vLLM 0.33's --enable-nccl-comm-suspend does; for vLLM without that option.

    windlass run -- python3 examples/vllm/sleep.py

For each state it prints the memory in use on each GPU, in MiB. The greedy tokens before the first sleep and after the last must be equal.
NCCL alone has ncclCommSuspend from 2.29.7 on. NVLink multicast stays off.
"""

import argparse
import ctypes
import gc
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
import decode  # noqa: E402  its settings keep multicast off

SUSPEND_MEMORY = 1


class Sleeper:
    """What a worker gets: calls of its own for each of its NCCL communicators, one after the other."""

    def each(self, function, *arguments):
        from vllm.distributed import parallel_state

        codes = []
        for group in (reference() for reference in parallel_state._groups.values()):
            communicator = getattr(getattr(group, "device_communicator", None), "pynccl_comm", None)
            if communicator is None or communicator.disabled:
                continue
            call = getattr(communicator.nccl.lib, function)
            codes.append(call(ctypes.c_void_p(communicator.comm.value), *arguments))
        if any(codes):
            raise RuntimeError(f"{function} gave {codes}, expected 0")
        return len(codes)

    def suspend_communicators(self):
        return self.each("ncclCommSuspend", ctypes.c_int(SUSPEND_MEMORY))

    def resume_communicators(self):
        return self.each("ncclCommResume")

    def used(self):
        import torch

        gc.collect()
        torch.cuda.synchronize()
        free, whole = torch.cuda.mem_get_info()
        return round((whole - free) / (1 << 20))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cycles", type=int, default=5, help="how often the engine sleeps")
    parser.add_argument("--keep", action="store_true", help="communicators stay awake")
    chosen = parser.parse_args()
    os.environ["VLLM_ALLREDUCE_USE_FLASHINFER"] = "0"
    from vllm import LLM

    llm = LLM(model=decode.model(chosen.layers, 0), load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=2,
              disable_custom_all_reduce=True, compilation_config={"cudagraph_capture_sizes": [1, 8], "pass_config": {"fuse_allreduce_rms": False}},
              enable_prefix_caching=False, gpu_memory_utilization=0.4, max_model_len=4096, seed=0, enable_sleep_mode=True,
              worker_extension_cls="sleep.Sleeper")
    used = lambda: llm.collective_rpc("used")
    seconds, before = decode.rounds(llm, 5, 8, decode.PROMPT, decode.TOKENS)
    print(f"awake: {used()} MiB, {1000 * statistics.median(seconds) / decode.TOKENS:.3f} ms a step", flush=True)
    for number in range(chosen.cycles):
        llm.sleep(level=1)
        engine = used()
        began = time.perf_counter()
        slept = [] if chosen.keep else llm.collective_rpc("suspend_communicators")
        middle = time.perf_counter()
        if number in (0, chosen.cycles - 1):
            print(f"engine asleep: {engine} MiB; {slept} communicators too: {used()} MiB", flush=True)
        again = time.perf_counter()
        if not chosen.keep:
            llm.collective_rpc("resume_communicators")
        ended = time.perf_counter()
        llm.wake_up()
    print(f"suspend {1000 * (middle - began):.0f} ms, resume {1000 * (ended - again):.0f} ms, through vLLM's call of all workers")
    seconds, after = decode.rounds(llm, 5, 8, decode.PROMPT, decode.TOKENS)
    print(f"awake again: {used()} MiB, {1000 * statistics.median(seconds) / decode.TOKENS:.3f} ms a step")
    print(f"tokens {'equal' if before == after and len(after) == 1 else 'differ'}: {sorted(before)} {sorted(after)}")
    sys.exit(before != after)


if __name__ == "__main__":
    main()
