"""The command line: the one room that knows ``compat`` from below, for it stands at the door.

``source`` reads what a command is about, ``app`` has the commands, ``machine`` looks at this one.
"""
