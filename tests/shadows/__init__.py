"""An oracle of the shadow run: what it says of an edited stock, beside what callers would see.

Each edit of stock runs twice, with a shadow run beside it and swapped, and all that a caller can
see of both is dumped. The shadow run must say "same" exactly where the dumps are equal. Knows
nothing of how `compat.swap` compares: only the arguments of `answers.report` and what it prints.
"""
