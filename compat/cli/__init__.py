"""The command line, which ``hypergrid/__main__`` starts.

``app`` has the commands: a new one is a function there under ``@app.command()``, or where it is
about jobs under ``@layout_command``, which ``command`` defines. ``source`` reads a layout,
``prints`` prints results, and ``machine`` examines this machine.
"""
