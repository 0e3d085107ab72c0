"""The ranks agree, through the store, before the first group is created and after the last.

Begin with ``prepare.agree``, phase 1: each rank writes what it is about to create; all raise the
same error if one differs, refuses or does not come. ``commit.all_or_none`` is phase 2: all ranks
have their groups, or all roll back. Both count arrivals with ``rendezvous``. ``store`` is the store
that the ranks share, with bounded waits, and ``survivors`` lets restarted processes meet
after a failure. No file here knows a process group.
"""
