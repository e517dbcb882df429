"""transformers' tensor parallelism: a small Llama with random weights, its logits and the time of a forward pass."""

import os
import sys
import time

# This file has the package's name, and Python would find it first.
sys.path.pop(0)
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

folder = f"/tmp/windlass-transformers-{os.getppid()}"
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
if dist.get_rank() == 0:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16, vocab_size=4096,
                                 dtype="bfloat16")).save_pretrained(folder)
dist.barrier()
model = LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.bfloat16)
tokens = (torch.arange(512, device="cuda") * 7 % 4096).view(4, 128)
with torch.no_grad():
    logits = model(tokens).logits
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        model(tokens)
    torch.cuda.synchronize()
if dist.get_rank() == 0:
    print("time", (time.perf_counter() - began) / 20 * 1e3)
    print("result", logits.argmax(-1).sum().item(), round(logits.float().abs().mean().item(), 4))
dist.destroy_process_group()
