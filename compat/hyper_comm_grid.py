"""Drop-in for ``megatron.core.hyper_comm_grid``."""

from hypergrid.grid import HyperCommGrid as HyperCommGrid

__all__ = ["HyperCommGrid"]
