"""Whether a layout computes what one rank computes: two optimizer steps of each are compared.

Begin with ``verify`` in ``search``, which is ``compat.verify``. ``layout`` is what is verified,
``ranks`` forks gloo processes, ``step`` takes one rank's steps and names what they computed by
megatron-core's sharded state dicts, ``compare`` finds what differs, and ``on_cpu`` makes
megatron-core run without a GPU. ``gpt`` is a small model to verify with. ``launch`` begins with a
launch line: ``arguments`` reads it, ``small_job`` and ``structure`` make it small, and ``script``
runs the functions of the training script.
"""

from compat.verification.compare import Finding as Finding
from compat.verification.layout import Layout as Layout
from compat.verification.search import Report as Report
from compat.verification.search import verify as verify
