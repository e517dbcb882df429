"""Megatron-core, tensor parallel: a column-parallel and a row-parallel layer, forward and backward."""

import os
import sys
import time

sys.path.pop(0)
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.model_parallel_config import ModelParallelConfig

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
tensor_parallel.model_parallel_cuda_manual_seed(0)
config = ModelParallelConfig(tensor_model_parallel_size=dist.get_world_size(), params_dtype=torch.bfloat16)
start = lambda weight: torch.nn.init.normal_(weight, std=0.02)
first = tensor_parallel.ColumnParallelLinear(4096, 16384, config=config, init_method=start, bias=False, gather_output=False)
second = tensor_parallel.RowParallelLinear(16384, 4096, config=config, init_method=start, bias=False, input_is_parallel=True, skip_bias_add=False)
torch.manual_seed(1)
data = torch.randn(1024, 1, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)


def step():
    loss = second(first(data)[0])[0].float().square().mean()
    loss.backward()
    return loss.item()


loss = step()
began = time.perf_counter()
for _ in range(20):
    step()
torch.cuda.synchronize()
if dist.get_rank() == 0:
    print("time", (time.perf_counter() - began) / 20 * 1e3)
    print("result", loss)
dist.destroy_process_group()
