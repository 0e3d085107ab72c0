"""Random arguments for ``initialize_model_parallel``, most of them wrong.

``scripts/parity --wild`` tries them.

``values.txt`` has the values, by the kinds of ``kinds.txt``. ``wild`` draws sets of arguments and
shows what a module does with one; ``tests.parity`` runs and compares them as all else.

What may differ, besides what ``tests.parity`` lets differ:

* *wrong kinds* (``odd`` in the table), such as a size of ``"two"``: ours may refuse them, also
  where stock has no use for the value and accepts it; `share`, `connect` and
  `creation` are ours alone;
* *numbers and lists of numpy and torch*: stock gets them as plain Python values;
* *several faults*: ours may report another one than stock. Types are compared where there is one;
* what stock hangs on (``alone`` in the table).
"""
