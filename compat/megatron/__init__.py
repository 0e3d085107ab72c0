"""Megatron's parallel state on hypergrid's groups.

One call of ``initialize_model_parallel`` passes these files in this order: ``request`` checks what
was asked and lays out the ranks; ``rows`` turns the rows of ``table`` into a plan; ``build``
creates the groups and puts them where upstream's private globals are; ``getters`` reads them
there.

One group on rank 3 of eight, after ``initialize_model_parallel(2, 2)``, file by file:

    request   request.decoder is tp=2, dp=2, pp=2 (dims of size 1 left out): rank 3 is at 1, 1, 0
    table     the row of _TENSOR_MODEL_PARALLEL_GROUP, over "tp"
    rows      GroupRow("TENSOR_MODEL_PARALLEL_GROUP", "decoder", ("tp",), ...), for all ranks alike
    build     plan.mine(row, 3) is {"TENSOR_MODEL_PARALLEL_GROUP": (2, 3)}; the pool creates it
    build     this global has the group, and _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS has [2, 3]
    getters   get_tensor_model_parallel_group() returns it, ..._rank() is 1, ..._world_size() is 2

A new group is a row of ``table``, a new release a row of ``releases``. ``communicators`` has NCCL's
options, ``rank_generator`` upstream's class over layouts. ``calls`` creates groups through
functions that outside code has put in place of ours, and ``helpers`` has those that create
additional groups.
"""
