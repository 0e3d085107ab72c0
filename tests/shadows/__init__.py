"""An oracle of the shadow run: what it says of an edited stock, beside what callers would see.

Each edit of stock runs twice, with a shadow run beside it and swapped, and all that a caller can
see of both is dumped. The shadow run must say "same" exactly where the dumps are equal. Knows
nothing of how `compat.swap` compares: only the arguments of `answers.report`.

Edits are rows. `edits.json` replaces a piece of stock's text, as vendors and branches do;
`patches` are functions that change the loaded module, as clients do. ``scripts/shadow_fuzz``
combines them by seed.
"""
