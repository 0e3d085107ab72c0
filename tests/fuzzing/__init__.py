"""Arguments that nobody should pass to ``initialize_model_parallel``, and what must come of them.

``wild`` draws sets of arguments, most of them wrong; ``judging`` runs one set with ours and with
stock and says what is the matter. ``scripts/fuzz`` does many in several processes.

What counts as a complaint is listed at `judging.judge`. What does not:

* *nonsense* (`judging.nonsense`): whole numbers below what they count. Any refusal is right;
* *documented refusals* (`judging.may_refuse`): what stock lets pass without using it, such as a
  number of virtual stages of ``"two"``;
* *plain values*: numbers and lists that come from numpy or torch count as plain ones. Ours agrees
  with stock about the set as given, or about the same set in plain values;
* *repairs*: as in ``tests.parity``;
* *several faults*: where a set has several, ours may tell another one first than stock does, in the
  type that stock has for a part of the set;
* *no opinion*: what stock hangs on, runs out of memory on, or fails at while it words its refusal.
"""
