"""The network below the ranks, and what an order of dims costs on it. No torch.

``levels.Network`` is hosts in NVLink domains, racks and pods, with bandwidths; ``files`` reads one
from SLURM's files, YAML and hostfiles, and writes orders of hosts: each format is there.
``traffic`` estimates what each level carries and ranks orders by it, ``placement`` decides which
host gets which ranks, and ``checks`` finds expensive placements.
"""
