"""Agreement of all ranks of a distributed job, for `advisor.due(step, broadcast=torch_ranks.broadcast)`.

May import PyTorch, which a distributed job has.
"""

from __future__ import annotations

from typing import Any


def broadcast(decision: bool, group: Any = None) -> bool:
    """Return the decision of rank 0; the own one where PyTorch is absent or its ranks are not connected.

    A collective operation: every rank calls `due` at the same steps. With NCCL it waits for the GPU, so ask
    every few steps, or hand a group of the backend gloo: `functools.partial(broadcast, group=gloo)`.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":  # it is there, and broken
            raise
        return decision
    distributed: Any = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return decision
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    flag: Any = torch.tensor([int(decision)], device=device)
    distributed.broadcast(flag, 0, group=group)
    return bool(flag.item())
