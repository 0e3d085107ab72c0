"""Recording of a running job, and diagnosis of a hang: the rank that everyone waits for.

In the job: ``record.record`` writes the groups (``dump``), torch's flight recorder and the stacks
of each rank; ``point_to_point`` adds the sends and receives that gloo does not record. Afterwards,
without torch: ``reading`` reads such a directory (``loading`` each file, in a process with limits),
``waiting`` finds who waits for whom, ``history`` what ranks usually do, ``causes`` the first cause,
and ``verdict.diagnose`` puts it into the words of ``sentences``. A new kind of hang begins in
``causes``.
"""
