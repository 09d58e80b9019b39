"""Trains one model in several processes, each of which stores a part of it and sees its own rows.

Run it with ``torchrun --standalone --nproc-per-node 2 docs/examples/train_on_a_mesh.py``. The checkpoint that it writes
can be read by any number of processes.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from offload import OffloadModel, OffloadOptimizer

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
rank, ranks = mesh.get_local_rank(), mesh.size()

torch.manual_seed(0)  # each rank keeps its part of what it is given
layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
model = OffloadModel(layers, "cpu", num_slices=3, checkpoint_activation=True, mesh=mesh)
optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=1e-2, max_norm=1.0)

inputs = torch.randn(64, 32)
targets = inputs[:, :1].sin()
losses = []
for _ in range(20):
    loss = nn.functional.mse_loss(model(inputs.chunk(ranks)[rank]), targets.chunk(ranks)[rank])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach() / ranks)
    losses.append(float(mean))

folder: list[str] = [tempfile.mkdtemp() if rank == 0 else ""]
dist.broadcast_object_list(folder)
states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
dcp.save(states, checkpoint_id=folder[0])
dcp.load(states, checkpoint_id=folder[0])
set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])

if rank == 0:
    stored = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; rank 0 of {ranks} stores {stored} of {whole} elements")
dist.destroy_process_group()
