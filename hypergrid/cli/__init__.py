"""The command line: the only package of the core that imports ``compat``.

``app`` has the commands: a new one is a function there under ``@command()``, which ``command``
defines. ``source`` reads a layout, ``prints`` prints results, and ``machine`` examines this
machine.
"""
