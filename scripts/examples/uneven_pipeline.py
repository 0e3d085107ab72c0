"""A pipeline whose stages differ in width: a stage of tp=2 feeds two of tp=1, in two replicas.

    torchrun --nproc-per-node 8 scripts/examples/uneven_pipeline.py

The stages lie on ranks 0-3 (tp=2 x dp=2), 4 and 6 (dp=2), 5 and 7 (dp=2). The links of the assembly
say who sends to whom; gradients come back the same way and equal those of the model on one rank.
"""

import torch
import torch.distributed as dist

from hypergrid import Assembly, GridPart
from hypergrid.groups.assembly import LinkGroups

BATCH, WIDTH, HIDDEN = 4, 6, 8


def whole_model() -> list[torch.Tensor]:
    """The batch, two matrices of the first stage, one of each other; alike on every rank."""
    random = torch.Generator().manual_seed(0)
    shapes = (BATCH, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)
    return [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]


def send(link: LinkGroups, value: torch.Tensor) -> None:
    """Forward, by the leader of this rank's part."""
    for target in link.sends_to:
        dist.send(value, target, group=link.leaders)


def receive(link: LinkGroups, value: torch.Tensor) -> torch.Tensor:
    for source in link.receives_from:
        dist.recv(value, source, group=link.leaders)
    return value


def send_back(link: LinkGroups, gradient: torch.Tensor) -> None:
    for source in link.receives_from:
        dist.send(gradient, source, group=link.leaders)


def receive_back(link: LinkGroups, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient for the part of this rank: its leader receives it and tells the others."""
    for target in link.sends_to:
        dist.recv(gradient, target, group=link.leaders)
    leader = dist.get_process_group_ranks(link.leaving)[-1]
    dist.broadcast(gradient, leader, group=link.leaving)
    return gradient


def first(assembly: Assembly) -> dict[str, torch.Tensor]:
    x, up, down, _, _ = whole_model()
    grid, link = assembly["lm.0"], assembly.link("lm.0", "lm.1")
    here = grid.coordinate()
    up = up.chunk(2, dim=1)[here["tp"]].clone().requires_grad_()
    down = down.chunk(2)[here["tp"]].clone().requires_grad_()
    part = (x.chunk(2)[here["dp"]] @ up).tanh() @ down
    total = part.detach().clone()
    dist.all_reduce(total, group=grid.get_pg("tp"))
    send(link, total)
    part.backward(receive_back(link, torch.empty_like(total)))
    return {f"up {here['tp']}": up, f"down {here['tp']}": down}


def middle(assembly: Assembly) -> dict[str, torch.Tensor]:
    *_, weight, _ = whole_model()
    arriving, leaving = assembly.link("lm.0", "lm.1"), assembly.link("lm.1", "lm.2")
    weight.requires_grad_()
    inputs = receive(arriving, torch.empty(BATCH // 2, WIDTH, dtype=torch.float64))
    outputs = (inputs.requires_grad_() @ weight).tanh()
    send(leaving, outputs.detach())
    outputs.backward(receive_back(leaving, torch.empty_like(outputs)))
    send_back(arriving, inputs.grad)
    return {"middle": weight}


def last(assembly: Assembly) -> dict[str, torch.Tensor]:
    *_, weight = whole_model()
    link = assembly.link("lm.1", "lm.2")
    weight.requires_grad_()
    inputs = receive(link, torch.empty(BATCH // 2, WIDTH, dtype=torch.float64))
    ((inputs.requires_grad_() @ weight).square().sum() / BATCH).backward()
    send_back(link, inputs.grad)
    return {"last": weight}


def reference() -> dict[str, torch.Tensor]:
    """The gradients on one rank, cut as the stages have them."""
    x, *weights = whole_model()
    up, down, middle, last = (weight.requires_grad_() for weight in weights)
    hidden = (((x @ up).tanh() @ down) @ middle).tanh() @ last
    (hidden.square().sum() / BATCH).backward()
    halves = zip(up.grad.chunk(2, dim=1), down.grad.chunk(2), strict=True)
    found = {"middle": middle.grad, "last": last.grad}
    for tp, (one, other) in enumerate(halves):
        found |= {f"up {tp}": one, f"down {tp}": other}
    return found


def main() -> dict[str, float]:
    """*Collective* over eight ranks: how far each gradient here is from that of one rank."""
    stages = [
        GridPart({"tp": 2, "dp": 2}, range(4)),
        GridPart({"dp": 2}, (4, 6)),
        GridPart({"dp": 2}, (5, 7)),
    ]
    assembly = Assembly({"lm": stages}).create()
    (name,) = assembly.layout.with_rank(dist.get_rank())
    weights = {"lm.0": first, "lm.1": middle, "lm.2": last}[name](assembly)
    errors, expected = {}, reference()
    for key, weight in weights.items():
        dist.all_reduce(weight.grad, group=assembly[name].get_pg("dp"))
        errors[key] = (weight.grad - expected[key]).abs().max().item()
    for key, error in errors.items():
        print(f"rank {dist.get_rank()}, {name}: {key} differs from one rank by {error:.1e}")
    assembly.destroy()
    return errors


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
