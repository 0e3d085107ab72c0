"""The audit: reads of parallel_state, with which state, and whether it is the right one.

``HYPERGRID_AUDIT=DIR`` or ``with recording(DIR):`` counts each read at each line; ``strict()``
raises where a module reads another state than its own; ``forbid()`` takes the globals away, module
by module. Off, none of this exists: getters are the functions that they were.
"""

from compat.audit.watch import ForbiddenReadError as ForbiddenReadError
from compat.audit.watch import WrongStateError as WrongStateError
from compat.audit.watch import begin as begin
from compat.audit.watch import forbid as forbid
from compat.audit.watch import recording as recording
from compat.audit.watch import strict as strict
