"""The command line: the only package of the core that imports ``compat``.

``app`` has the commands, ``command`` declares one, ``source`` reads a layout, ``prints`` prints
results, and ``machine`` examines this machine.
"""
