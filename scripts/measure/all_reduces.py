#!/usr/bin/env python3
"""Times all-reduces of decode side by side, as frameworks call them: alone, and between two matrix products of 32 layers in a CUDA graph.

    torchrun --nproc-per-node 2 scripts/measure/all_reduces.py                  # NCCL, and what is installed of the others
    windlass run -- torchrun --nproc-per-node 2 scripts/measure/all_reduces.py  # the same, with Windlass as `nccl`

Each row is a JSON line: backend, mode (graph, eager, layers), tokens, hidden, bytes, us of one all-reduce (of one layer), rank 0's median of
rounds. `layers` has a product, the all-reduce, residual and norm, and a product. A first line for each backend has the time and the memory of
its first call. What is not installed, or fails, is one line `skipped`. NVLink multicast stays off. --verdict FILE... compares runs, --table
FILE... prints the least and the greatest time of each cell.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
                 "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
LAYERS, CALLS, EPSILON = 32, 16, 1e-6
AHEAD = 0.98  # of the other's time, in every run


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="nccl,custom,flashinfer,flashinfer-early,sglang,two-shot", help="which, by commas")
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512,1024,2048", help="rows of a tensor, by commas")
    parser.add_argument("--hidden", default="4096,5120,8192", help="columns, by commas")
    parser.add_argument("--modes", default="graph,eager,layers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--name", default="nccl", help="what the library is called in rows: nccl or windlass")
    parser.add_argument("--out", type=Path, help="file of the rows; standard output unless said")
    parser.add_argument("--verdict", nargs="+", type=Path, metavar="FILE", help="intervals in which Windlass is ahead in all runs of FILE...")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="the rows of FILE... as tables")
    return parser.parse_args()


class Nccl:
    """What reaches NCCL's functions."""

    def __init__(self, _):
        import torch.distributed as dist

        self.sum = dist.all_reduce

    def __call__(self, tensor):
        self.sum(tensor)
        return tensor


class TwoShot:
    """PyTorch's symmetric memory; the tensor lives there."""

    def __init__(self, place):
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        self.group = dist.group.WORLD.group_name
        self.buffer = symmetric.empty(place["elements"], dtype=torch.bfloat16, device=place["device"])
        symmetric.rendezvous(self.buffer, self.group)
        self.sum = torch.ops.symm_mem.two_shot_all_reduce_

    def __call__(self, tensor):
        shared = self.buffer[: tensor.numel()]
        shared.copy_(tensor.view(-1))
        self.sum(shared, "sum", self.group)
        return shared.view_as(tensor)


class Custom:
    """vLLM's CUSTOM: copying outside of `capture`, registered within."""

    def __init__(self, place):
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

        self.communicator = CustomAllreduce(group=place["cpu"], device=place["device"])
        self.capture = self.communicator.capture

    def __call__(self, tensor):
        summed = self.communicator.custom_all_reduce(tensor)
        if summed is None:
            raise ValueError(f"{tensor.nbytes} bytes are refused")
        return summed


class Sglang(Custom):
    """SGLang's V2."""

    def __init__(self, place):
        from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

        self.communicator = CustomAllReduceV2(place["cpu"], place["device"])
        self.capture = self.communicator.capture

    def __call__(self, tensor):
        if not self.communicator.should_custom_ar(tensor):
            raise ValueError(f"{tensor.nbytes} bytes are refused")
        return self.communicator.custom_all_reduce(tensor)


class FlashInfer:
    """FlashInfer's, alone and fused with residual and norm. Early launch is programmatic dependent launch."""

    is_early = False

    def __init__(self, place):
        import flashinfer.comm as comm
        import torch

        self.comm, self.spaces = comm, {}
        for hidden in place["hidden"]:
            self.spaces[hidden] = comm.create_allreduce_fusion_workspace(
                backend="trtllm", world_size=place["ranks"], rank=place["rank"], max_token_num=place["tokens"], hidden_dim=hidden,
                dtype=torch.bfloat16)

    def __call__(self, tensor):
        return self.comm.allreduce_fusion(
            input=tensor, workspace=self.spaces[tensor.shape[1]], pattern=self.comm.AllReduceFusionPattern.kAllReduce,
            launch_with_pdl=self.is_early, trigger_completion_at_end=True)

    def fused(self, tensor, residual, weight, normed):
        self.comm.allreduce_fusion(
            input=tensor, workspace=self.spaces[tensor.shape[1]], pattern=self.comm.AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl=self.is_early, residual_in=residual, residual_out=residual, norm_out=normed, rms_gamma=weight,
            rms_eps=EPSILON, fp32_acc=True, trigger_completion_at_end=True)
        return normed


class FlashInferEarly(FlashInfer):
    is_early = True


BACKENDS = {"nccl": Nccl, "custom": Custom, "flashinfer": FlashInfer, "flashinfer-early": FlashInferEarly, "sglang": Sglang, "two-shot": TwoShot}


def norms():
    """Residual and norm: vLLM's kernel where it is installed, and the compiler's."""
    import torch

    def plain(tensor, residual, weight):
        residual.add_(tensor)
        wide = residual.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(tensor.dtype) * weight

    # Each size is a program of its own, as in vLLM's capture of graphs.
    torch._dynamo.config.recompile_limit = 256
    found = {"compiled": torch.compile(plain, dynamic=False)}
    try:
        from vllm import _custom_ops

        def kernel(tensor, residual, weight):
            _custom_ops.fused_add_rms_norm(tensor, residual, weight, EPSILON)
            return tensor

        found["vllm"] = kernel
    except Exception as error:
        say_skipped("norm vllm", error)
    return found


def say_skipped(what, error):
    if os.environ.get("RANK", "0") == "0":
        print(f"{what}: skipped: {type(error).__name__}: {str(error)[:160]}", file=sys.stderr, flush=True)


class Bench:
    def __init__(self, chosen):
        import torch
        import torch.distributed as dist

        self.chosen, self.torch, self.dist = chosen, torch, dist
        local = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", local)
        torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=self.device)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        hidden, tokens = numbers(chosen.hidden), numbers(chosen.tokens)
        self.place = {"device": self.device, "cpu": dist.new_group(backend="gloo"), "rank": self.rank, "ranks": self.ranks,
                      "hidden": hidden, "tokens": max(tokens), "elements": max(hidden) * max(tokens)}
        self.out = chosen.out.open("a") if chosen.out and self.rank == 0 else sys.stdout

    def together(self, what, make):
        """What `make` gives, if it gives something on every rank: a rank alone would wait for the others for ever."""
        try:
            made, error = make(), None
        except Exception as raised:
            made, error = None, raised
        failures = [None] * self.ranks
        self.dist.all_gather_object(failures, error and repr(error), group=self.place["cpu"])
        if any(failures):
            say_skipped(what, error or RuntimeError(f"another rank: {next(filter(None, failures))}"))
            return None
        return made

    def row(self, **cells):
        if self.rank == 0:
            print(json.dumps({**cells, "ranks": self.ranks}), file=self.out, flush=True)

    def run(self):
        found = norms() if "layers" in self.chosen.modes else {}
        for key in self.chosen.backends.split(","):
            name = self.chosen.name if key == "nccl" else key
            free, began = self.torch.cuda.mem_get_info()[0], time.perf_counter()
            backend = self.together(name, lambda: BACKENDS[key](self.place))
            if backend is None:
                continue
            first = self.together(name, lambda: self.checked(backend))
            if first is None:
                continue
            self.row(backend=name, mode="first", ms=round(1e3 * (time.perf_counter() - began), 1),
                     mib=round((free - self.torch.cuda.mem_get_info()[0]) / (1 << 20), 1))
            for hidden in self.place["hidden"]:
                for tokens in numbers(self.chosen.tokens):
                    self.cells(name, backend, tokens, hidden, found)
            del backend

    def checked(self, backend):
        ones = self.torch.full((4, self.place["hidden"][0]), float(self.rank + 1), dtype=self.torch.bfloat16, device=self.device)
        summed = backend(ones)
        self.torch.cuda.synchronize()
        expected = self.ranks * (self.ranks + 1) / 2
        if not bool((summed == expected).all()):
            raise ValueError(f"the sum is {summed.flatten()[0].item()}, expected {expected}")
        return True

    def cells(self, name, backend, tokens, hidden, found):
        kind = {"dtype": self.torch.bfloat16, "device": self.device}
        tensor = self.torch.zeros(tokens, hidden, **kind)
        where = {"backend": name, "tokens": tokens, "hidden": hidden, "bytes": tensor.nbytes}
        for mode in self.chosen.modes.split(","):
            if mode == "layers":
                self.layers(where, backend, tensor, found, kind)
                continue

            def calls():
                for _ in range(CALLS):
                    backend(tensor)

            step = self.together(f"{name} {mode} {tensor.nbytes}", lambda: self.captured(backend, calls) if mode == "graph" else self.tried(calls))
            if step:
                self.row(**where, mode=mode, us=self.timed(step, CALLS))

    def layers(self, where, backend, tensor, found, kind):
        hidden = tensor.shape[1]
        share = hidden // self.ranks
        residual, weight, normed = (self.torch.zeros_like(tensor), self.torch.ones(hidden, **kind), self.torch.empty_like(tensor))
        inner, outer = self.torch.zeros(hidden, share, **kind), self.torch.zeros(share, hidden, **kind)
        ways = {f"norm {key}": lambda x, norm=norm: norm(backend(x), residual, weight) for key, norm in found.items()}
        if hasattr(backend, "fused"):
            ways["fused"] = lambda x: backend.fused(x, residual, weight, normed)
        # What the products alone take.
        ways["products"] = lambda x: x
        for key, way in ways.items():

            def step():
                state = tensor
                for _ in range(LAYERS):
                    state = way(state @ inner @ outer)

            made = self.together(f"{where['backend']} layers {key} {tensor.nbytes}", lambda: self.captured(backend, step))
            if made:
                self.row(**where, mode="layers", norm=key, us=self.timed(made, LAYERS))

    def captured(self, backend, step):
        with getattr(backend, "capture", contextlib.nullcontext)():
            for _ in range(2):
                step()
            self.torch.cuda.synchronize()
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
        return graph.replay

    def tried(self, step):
        """A step that has run once: a backend may refuse a size."""
        step()
        self.torch.cuda.synchronize()
        return step

    def timed(self, step, calls):
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(self.chosen.rounds + 1):
            self.dist.barrier()
            self.torch.cuda.synchronize()
            begin.record()
            for _ in range(10):
                step()
            end.record()
            self.torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 100 / calls)
        return round(statistics.median(times[1:]), 2)


def numbers(text):
    return [int(number) for number in text.split(",")]


def verdict(files):
    """For each other backend and mode: the sizes at which Windlass took at most AHEAD of its time in every run."""
    runs = []
    for file in files:
        cells = {}
        for row in map(json.loads, file.read_text().splitlines()):
            if "us" in row:
                key = row["mode"], row["hidden"], row["bytes"]
                cells.setdefault(key, {}).setdefault(row["backend"], {})[row.get("norm", "")] = row["us"]
        runs.append(cells)
    for other in sorted({backend for cells in runs for by in cells.values() for backend in by} - {"windlass"}):
        for mode in ("graph", "eager", "layers"):
            for hidden in sorted({key[1] for key in runs[0]}):
                ahead, timed = [], []
                for key in sorted(key for key in runs[0] if key[:2] == (mode, hidden)):
                    pairs = [(best(cells.get(key, {}).get("windlass")), best(cells.get(key, {}).get(other))) for cells in runs]
                    if all(ours and theirs for ours, theirs in pairs):
                        timed.append(key[2])
                        ahead += [key[2]] if all(ours <= AHEAD * theirs for ours, theirs in pairs) else []
                if timed:
                    print(f"{mode}, hidden {hidden}, against {other}: ahead at {ahead or 'no size'} of {timed} bytes")


def tables(files):
    """A table for each mode and number of columns; `layers` has each backend's fastest norm, named by its first letter."""
    cells, firsts = {}, {}
    for row in (json.loads(line) for file in files for line in file.read_text().splitlines()):
        if "us" in row:
            cells.setdefault((row["mode"], row["hidden"]), {}).setdefault(row["bytes"], {}).setdefault(row["backend"], {}).setdefault(
                row.get("norm", ""), []).append(row["us"])
        else:
            firsts.setdefault(row["backend"], []).append(f"{row['ms']:.0f} ms, {row['mib']:.0f} MiB")
    for name, first in firsts.items():
        print(f"first call of {name}: {'; '.join(first)}")
    for (mode, hidden), by in sorted(cells.items()):
        names = sorted({name for backends in by.values() for name in backends})
        print(f"\n{mode}, hidden {hidden}\n" + " | ".join([f"{'KiB':>6}", *(f"{name:>17}" for name in names)]))
        for size, backends in sorted(by.items()):
            print(" | ".join([f"{size >> 10:6}", *(f"{cell(backends.get(name)):>17}" for name in names)]))


def cell(norms):
    times = {norm: us for norm, us in (norms or {}).items() if norm != "products"}
    if not times:
        return ""
    norm = min(times, key=lambda norm: min(times[norm]))
    return f"{min(times[norm]):.2f} {max(times[norm]):.2f} {norm.removeprefix('norm ')[:1]}".strip()


def best(norms):
    """The framework would take its fastest norm."""
    times = [us for norm, us in (norms or {}).items() if norm != "products"]
    return min(times) if times else None


def main():
    chosen = options()
    if chosen.verdict:
        return verdict(chosen.verdict)
    if chosen.table:
        return tables(chosen.table)
    for name, expected in MULTICAST_OFF.items():
        if os.environ.setdefault(name, expected) != expected:
            sys.exit(f"{name} is {os.environ[name]!r}, expected {expected!r}: NVLink multicast must stay off here")
    if "LOCAL_RANK" not in os.environ:
        sys.exit("no LOCAL_RANK: start it with torchrun --nproc-per-node 2")
    try:
        import torch
    except ImportError:
        sys.exit("skipped: PyTorch is not installed")
    if torch.cuda.device_count() < 2:
        sys.exit(f"skipped: PyTorch sees {torch.cuda.device_count()} GPUs, expected two or more")
    bench = Bench(chosen)
    bench.run()
    bench.dist.destroy_process_group()


if __name__ == "__main__":
    main()
