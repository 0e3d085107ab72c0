"""Live process groups. Nothing else in hypergrid creates or closes one.

Begin with ``grid.HyperCommGrid``: ``create_pg("tp-dp")`` asks its ``pool.GroupPool`` for a group.
The pool lets the ranks agree (``hypergrid.agreement``), then ``creation`` asks torch for the group,
by its members alone, by a split or with every rank. ``backends`` says what gloo, NCCL and the fake
backend can do, ``gloo`` and ``sockets`` connect gloo's groups. ``closing`` ends groups, ``abort``
frees a rank that waits in one, ``suspension`` frees their memory for a while. ``environment`` is
another way to ask for groups: by names.
"""
