"""An encoder and a decoder on different ranks, each with a grid of its own.

    torchrun --nproc-per-node 8 scripts/examples/encoder_decoder.py

Ranks 0-3 hold the encoder as tp=2 x dp=2, ranks 4-7 the decoder as dp=4. Each encoder rank sends a
quarter of the batch's activations to one decoder rank and gets their gradients back; all gradients
equal those of the whole model on one rank.
"""

import torch
import torch.distributed as dist

from hypergrid import HyperCommGrid, validate_grids

BATCH = 8
WIDTH = 6


def whole_model() -> list[torch.Tensor]:
    """The batch, the encoder's two matrices and the decoder's one: alike on every rank."""
    random = torch.Generator().manual_seed(0)
    tensors = []
    for rows in (BATCH, WIDTH, WIDTH, WIDTH):
        tensor = torch.randn(rows, WIDTH, generator=random, dtype=torch.float64)
        tensors.append(tensor)
    return tensors


def loss_of(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight).square().sum() / BATCH


def encode(grid: HyperCommGrid) -> dict[str, torch.Tensor]:
    """Half of the columns of ``up`` and rows of ``down``, for half of the batch."""
    x, up, down, _ = whole_model()
    peer = dist.get_rank() + 4
    tp = grid.coordinate()["tp"]
    dp = grid.coordinate()["dp"]
    up = up.chunk(2, dim=1)[tp].clone()
    down = down.chunk(2)[tp].clone()
    up.requires_grad_()
    down.requires_grad_()
    samples = x.chunk(2)[dp]
    part = (samples @ up).tanh() @ down
    hidden = part.detach().clone()
    dist.all_reduce(hidden, group=grid.get_pg("tp"))
    # Both ranks of a tp pair hold the sum now: each sends one half of it.
    own_half = hidden.chunk(2)[tp].contiguous()
    dist.send(own_half, peer)
    # The gradients of both halves are needed by both ranks.
    halves = list(torch.empty_like(hidden).chunk(2))
    received = torch.empty_like(own_half)
    dist.recv(received, peer)
    dist.all_gather(halves, received, group=grid.get_pg("tp"))
    part.backward(torch.cat(halves))
    for weight in (up, down):
        dist.all_reduce(weight.grad, group=grid.get_pg("dp"))
    return {"up": up.grad, "down": down.grad}


def decode(grid: HyperCommGrid) -> dict[str, torch.Tensor]:
    """All of ``out``, for a quarter of the batch."""
    x, _, _, out = whole_model()
    peer = dist.get_rank() - 4
    samples = x.chunk(4)[0]
    hidden = torch.empty_like(samples)
    dist.recv(hidden, peer)
    hidden.requires_grad_()
    out.requires_grad_()
    loss_of(hidden, out).backward()
    dist.send(hidden.grad, peer)
    dist.all_reduce(out.grad, group=grid.get_pg("dp"))
    return {"out": out.grad}


def main() -> dict[str, float]:
    """*Collective* over eight ranks: how far this rank's gradients are from those of one rank."""
    encoder = HyperCommGrid([2, 2], ["tp", "dp"])
    decoder = HyperCommGrid([4], ["dp"], rank_offset=4)
    validate_grids([encoder, decoder])  # nobody is in both or left out
    for grid in (encoder, decoder):
        for dim in grid.dim_names:
            grid.create_pg(dim)  # None on the ranks outside

    # The same on this rank alone.
    x, up, down, out = whole_model()
    for weight in (up, down, out):
        weight.requires_grad_()
    hidden = (x @ up).tanh() @ down
    loss_of(hidden, out).backward()
    if encoder.is_current_rank_in_grid():
        gradients = encode(encoder)
        tp = encoder.coordinate()["tp"]
        expected = {"up": up.grad.chunk(2, dim=1)[tp], "down": down.grad.chunk(2)[tp]}
    else:
        gradients = decode(decoder)
        expected = {"out": out.grad}
    errors = {}
    for name, gradient in gradients.items():
        difference = gradient - expected[name]
        errors[name] = difference.abs().max().item()

    print(f"rank {dist.get_rank()}: largest difference of gradients {errors}", flush=True)
    for grid in (encoder, decoder):
        grid.destroy()
    return errors


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
