"""Megatron's parallel state on the core: the table, arguments, plans, groups and getters."""
