"""The command line, which ``hypergrid/__main__`` starts.

``app`` has the commands: a new one is a function there under ``@command()``, which ``command``
defines. ``source`` reads a layout, ``prints`` prints results, and ``machine`` examines this
machine.
"""
