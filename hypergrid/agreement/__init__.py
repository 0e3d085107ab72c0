"""The ranks agree, through the store, before the first group is created and after the last.

Begin with ``commit``: in phase 1 each rank says what it is about to create, and all raise the same
error if one differs, refuses or does not come; in phase 2 all have their groups, or all roll back.
``keys`` is the table of what can come of a phase, and who says so under which key of the store.
``reports`` is what ranks say in full where one is missing or differs. ``store`` is the store that
ranks share, with bounded waits. No file here knows a process group.
"""
