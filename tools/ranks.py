"""One process a GPU, started by torchrun: who am I, and sums over all processes ("ranks").

Every rank has its own copy of the frozen base, and samples and trains on its own share of the
prompts. Ranks add up LoRA's gradients and measurements (all_sum), and send each other small Python
objects (gather), such as names, seconds, and facts that must be the same. A process that torchrun
did not start is rank 0 of 1: its sums are its own values, and gather returns [its own value].

Needs: torch.
"""

import os
from contextlib import contextmanager, suppress
from threading import Thread

import torch
import torch.distributed as dist

# Import this before a process group exists: its default arguments would keep that group alive.
import torch.distributed.nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def join_ranks(device):
    """ "cuda" or "cpu" → this process's device. Under torchrun, join the process group and take the
    GPU of the local rank. A thread starts the GPU while the caller reads its files.
    """
    if "RANK" in os.environ:
        _check_variables(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)  # Triton launches on the current device
    if device != "cpu":
        Thread(target=_start, args=[device]).start()
    return device


def _check_variables(device):
    """ValueError: they are not as torchrun sets them, so that joining would wait for ever."""
    names = ["WORLD_SIZE", "RANK", *(["LOCAL_RANK"] if device == "cuda" else [])]
    count, rank, *_ = values = [os.environ.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values) or int(rank) >= int(count):
        given = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise ValueError(f"{given} name no rank: start ranks by torchrun, or unset RANK for one")


def _start(device):
    """The first allocation starts CUDA, which takes seconds."""
    with suppress(Exception):  # whoever allocates next meets the same error
        torch.zeros(1, device=device)


def rank_and_count():
    """→ (this process's rank, number of ranks)."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def leave_ranks():
    """Destroy the process group. Call this only while all ranks are alive: at the end of a run that
    did not fail, or in alike(), which every rank reaches. After another failure
    destroy_process_group would wait for dead ranks.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def all_sum(tensor):
    """Sum a tensor over ranks, in place, and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def sum_over_ranks(metrics):
    """{name: number or tensor ()} → {name: sum over ranks, a float}, by one all-reduce in fp64.
    Every rank must give the same names in the same order.
    """
    values = torch.tensor([float(value) for value in metrics.values()], dtype=torch.float64)
    return dict(zip(metrics, all_sum(values).tolist(), strict=True))


def union_over_ranks(names):
    """→ the sorted list of all names that any rank gives."""
    return sorted(set().union(*gather(list(names))))


def gather(value):
    """→ [the value of rank 0, of rank 1, …], on every rank. pickle must be able to hold them."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def share_out(count: int) -> tuple[int, int]:
    """Ranks take from one sequence, each as many as its count, in their order.

    → where this rank's share begins, that is the sum of the counts of lower ranks; and the sum of
    all counts. Every rank must call this, if with count 0.
    """
    counts = gather(count)
    return sum(counts[: rank_and_count()[0]]), sum(counts)


@contextmanager
def alike():
    """Context manager around what every rank loads for itself. It yields a list, for facts that
    must be the same on all ranks.

    If a rank fails, or the facts of two differ, all ranks end: with their own error, or with a
    ValueError. Without this, the other ranks would wait, and end in an error of the network.
    """
    facts, mine = [], None
    try:
        yield facts
        mine = repr(facts)
    finally:
        differ = len(set(gather(mine))) > 1
        if differ:
            leave_ranks()
    if differ:
        raise ValueError(
            "the ranks do not agree: one has failed, or they read different problems or "
            f"folders (here {facts}); let all see the same files, and seed problems()"
        )


def sum_gradients(parameters):
    """Replace the gradients of the parameters by their sums over ranks, with one all-reduce."""
    if rank_and_count()[1] > 1:
        gradients = [p.grad for p in parameters]
        vector_to_parameters(all_sum(parameters_to_vector(gradients)), gradients)
