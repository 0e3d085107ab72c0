"""What can go wrong between ranks."""


class AgreementError(RuntimeError):
    """The ranks of a window were asked for different things, or one of them did not come."""


class CreationError(RuntimeError):
    """Torch could not create a group, here or on another rank of the window."""
