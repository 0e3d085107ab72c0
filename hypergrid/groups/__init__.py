"""Live process groups. Nothing else in hypergrid creates or closes one.

Begin with ``grid.HyperCommGrid``: ``create_pg("tp-dp")`` asks its ``pool.GroupPool`` for a group.
The pool lets the ranks agree (``hypergrid.agreement``), then ``creation`` asks torch for the group,
by its members alone, by a split or with every rank: the rules of each backend are there, and what
gloo needs in ``gloo``. ``closing`` ends groups, ``abort`` frees a rank that waits in one,
``suspension`` frees their memory for a while. ``meshes`` makes a ``DeviceMesh`` of a grid's groups,
``validate`` checks grids that are used together.
"""
