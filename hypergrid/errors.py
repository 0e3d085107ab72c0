"""Errors between ranks."""


class AgreementError(RuntimeError):
    """The ranks of a window were asked for different groups, or one did not reach creation."""


class AbortedError(Exception):
    """``hypergrid.abort()`` was called while groups were created; none is left."""


class CreationError(RuntimeError):
    """Torch could not create a group, here or on another rank of the window."""
