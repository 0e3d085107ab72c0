"""Errors between ranks."""


class AgreementError(RuntimeError):
    """The ranks of a window were asked for different groups, or one did not reach creation."""


class CreationError(RuntimeError):
    """Torch could not create a group, here or on another rank of the window."""
