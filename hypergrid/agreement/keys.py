"""THE TABLE of what the store holds of a phase: each key, who sets the outcome, what follows.

A phase is one question to all ranks, under keys of its own. It is open until the first rank adds to
``CLOSED``. That rank alone sets ``OUTCOME``, and all ranks wait for it:

=====================  ========================================  =================================
outcome                set by                                    what follows
=====================  ========================================  =================================
an agreement as JSON   the last rank to arrive in phase 1,       each rank creates its groups
                       where all propose the same
``CREATED``            the last rank to arrive in phase 2        each rank keeps its groups
``COMPARE``            the last rank to arrive in phase 1,       each rank reports its proposal in
                       where proposals or abilities differ, or   ``ENTRIES``, and the last one gives
                       one refuses                               the ``VERDICT``
``ROLL_CALL``          a rank whose timeout is over, while       each rank that is there answers in
                       ranks are missing                         ``PRESENT``, and the last one gives
                                                                 the ``VERDICT``
any other text         a rank that fails, is aborted, or finds   it is the error of each rank, which
                       a process that has ended, a window that   rolls back what it has
                       overlaps, or no way of creation that all
                       ranks support
=====================  ========================================  =================================

An outcome that is published early closes the phase for ranks that are still to arrive: in phase 1
they join the next round. The verdict is an agreement as JSON, or the error of each rank. Where the
rank that should set an outcome or a verdict has ended, the others do, and the first value holds.
"""

# Numbers, to which each rank adds.
ARRIVED = "arrived"  # one for each rank that arrives, and above these bits the sum of their digests
FURTHER_BITS = "bits"  # in a large world, the sum of the bits for which ARRIVED has no room
CLOSED = "closed"  # the rank that adds the first one sets the outcome
REPORTED = "reported"  # ranks that have reported or answered; the last one gives the verdict
READ = "read"  # the ranks that know of a failure; who serves the store stays until all do

# Texts, of which the first holds.
OUTCOME = "outcome"
VERDICT = "verdict"

# Lines, which ranks append.
ENTRIES = "entries"  # a proposal of each kind; how many ranks have it is in "of/" and its digest
PRESENT = "present"  # ranks that have answered or reported: the others are named as missing
WAITING = "waiting"  # ranks that wait for addresses in phase 2: who waits for these fails later
PLACES = "places"  # where ranks are that wait long, for warnings and the search for ended processes
CLAIMS = "claims"  # ranks that would give the next warning: the lowest one does

OF_A_PHASE = (
    ARRIVED,
    FURTHER_BITS,
    CLOSED,
    REPORTED,
    READ,
    OUTCOME,
    VERDICT,
    ENTRIES,
    PRESENT,
    WAITING,
    PLACES,
    CLAIMS,
)

# Outcomes.
CREATED = "created"
COMPARE = "compare"
ROLL_CALL = "roll call"
