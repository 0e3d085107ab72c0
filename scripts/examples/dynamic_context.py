"""Context parallel groups whose size changes with the length of each sequence, asked for on demand.

    torchrun --nproc-per-node 8 scripts/examples/dynamic_context.py

Each batch has sequences of other lengths, and as many ranks work on one as it needs. A rank asks
for the group of its sequence when it comes to it: nothing is agreed on, and no group is created
twice.
"""

import torch
import torch.distributed as dist

from hypergrid import HyperCommGrid

TOKENS = 16  # that one rank can hold
LENGTHS = (24, 128, 16, 48, 24)  # of the sequences, one after the other


def main() -> dict[str, list[int]]:
    """*Collective* over eight ranks: the sizes of this rank's groups, and its sums of tokens."""
    grid = HyperCommGrid([8], ["cp"])
    grid.create_pg("cp")
    sizes, sums, names = [], [], set()
    for length in LENGTHS:
        group = grid.subgroup("cp", -(-length // TOKENS), limit=4)
        tokens = torch.ones(length // group.size()).sum()
        dist.all_reduce(tokens, group=group)
        sizes.append(group.size())
        sums.append(int(tokens))
        names.add(group.group_name)
    print(f"rank {dist.get_rank()}: groups of {sizes} ranks, {len(names)} created")
    grid.destroy()
    return {"sizes": sizes, "sums": sums, "created": [len(names)]}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
