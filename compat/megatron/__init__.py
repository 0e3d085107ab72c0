"""Megatron's parallel state on hypergrid's groups.

One call of ``initialize_model_parallel`` passes these files in this order: ``arguments`` checks
what was asked and lays out the ranks; ``planning`` turns the rows of ``table`` into a plan;
``build`` creates the groups and puts them where upstream's private globals are; ``getters`` reads
them there.

A new group is a row of ``table``, a new release a row of ``releases``. ``communicators`` has NCCL's
options, ``rank_generator`` and ``rank_lists`` upstream's lists of ranks, ``encoder`` the encoder of
0.12 and 0.13. ``replaced`` finds functions that outside code has put in place of ours, ``calls``
creates groups through them, and ``helpers`` has those that create additional groups.
"""
