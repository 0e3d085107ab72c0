"""The command line: the one room that knows ``compat`` from below, for it stands at the door.

``app`` has the commands, ``source`` reads what one is about, ``prints`` says what came of it, and
``machine`` looks at this one.
"""
