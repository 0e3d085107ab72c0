"""Getter-by-getter parity of a candidate module with stock ``parallel_state``, in one process.

Draw a random configuration of ``initialize_model_parallel``, run stock and the candidate under
torch's ``fake`` backend as some of its ranks, write down everything that either shows, compare.

>>> report = run(candidate, "0.19.2", n=2000, seed=1, max_world=1024)
>>> assert not report.differences, report.examples

``scripts/parity`` does this from the command line, each release in a process of its own.

``running`` has this loop: ``configurations`` draws, ``breaking`` makes one that stock refuses,
``recording`` stands in the place of torch's group calls, ``snapshots`` asks for everything that
``surface`` and ``helpers`` list, and ``comparing`` compares. ``repairs`` and ``mutants`` are copies
of stock in which one place is put right or broken. ``watching`` runs a program and asks everything
after each of its steps: ``patching`` has programs that write and replace what is the module's,
``tests.clients`` those of other projects. ``tests.fuzzing`` draws wrong arguments. ``grids``
compares ``HyperCommGrid``, ``shadowing`` a shadow run. The text files are tables of arguments,
calls and values, in Python.

What may differ, and nothing else:

* *supersets*: the candidate may have functions and keyword-only arguments of its own;
* *leftovers*: stock forgets part of its state on destroy. Afterwards the candidate may answer as
  stock does or as stock did before the first initialisation;
* *failures*: a failed initialisation of stock leaves some globals set. Only the exception's type is
  compared, if an ``assert`` or ``raise`` in stock's own source made it (`recording.is_deliberate`);
* *nonsense* (`breaking.is_nonsense`): sizes below one, negative offsets and repeated tokens, which
  stock sometimes lets pass. The candidate may refuse them with any exception;
* *repeated barriers*: stock repeats the barrier that starts SHARP on replicas once for each later
  expert data-parallel group; which groups meet is compared, not how often;
* *repairs* (`repairs.REPAIRS`): where stock's own code defeats itself, the candidate may agree with
  stock or with a copy of stock in which that one place is put right.
"""

from tests.parity.running import Report, run

__all__ = ["Report", "run"]
