"""Errors between ranks."""


class AgreementError(RuntimeError):
    """The ranks of a window were asked for different groups, or one did not reach creation."""


class AbortedError(Exception):
    """``hypergrid.abort()`` was called while groups were created, or used; none is left."""


class NoGroupsError(AbortedError, AssertionError):
    """A getter was called after ``hypergrid.abort()``, before new groups were created."""


class CreationError(RuntimeError):
    """Torch could not create a group, here or on another rank of the window."""
