"""Errors whose types are upstream's where upstream has several for one fault."""

from __future__ import annotations


class SizeError(ValueError, ZeroDivisionError):
    """A size below 1, which upstream divides by or quietly makes no groups of."""


class ArgumentError(TypeError, ValueError, AttributeError, RuntimeError, AssertionError):
    """An argument of a kind that nothing can be made of, such as a size of ``"two"``.

    Upstream never looks: which of these it raises depends on what first stumbles over the value.
    """
