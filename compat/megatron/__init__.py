"""Megatron's parallel state on hypergrid's groups.

One call of ``initialize_model_parallel`` passes these files in this order: ``request`` checks what
was asked and lays out the ranks; ``rows`` turns the rows of ``table`` into a plan; ``build``
creates the groups and puts them where upstream's private globals are; ``getters`` reads them
there.

A new group is a row of ``table``, a new release a row of ``releases``. ``communicators`` has NCCL's
options, ``rank_generator`` upstream's class over layouts. ``calls`` creates groups through
functions that outside code has put in place of ours, and ``helpers`` has those that create
additional groups.
"""
