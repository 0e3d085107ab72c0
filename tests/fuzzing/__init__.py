"""Random arguments for ``initialize_model_parallel``, most of them wrong.

``wild`` draws sets of arguments, most of them from ``values.txt``; ``judging`` runs one set with
ours and with stock and lists what is wrong (see ``judging.judge``). ``scripts/fuzz`` runs many.

What may differ:

* *wrong kinds and nonsense* (`judging.may_refuse`), such as a size of ``"two"``, or one below 1:
  ours may refuse them, also where stock has no use for the value and accepts it;
* *numbers and lists of numpy and torch*: stock gets them as plain Python values;
* *repairs*: as in ``tests.parity``;
* *several faults*: ours may report another one than stock. Types are compared where there is one;
* what stock hangs on.
"""
