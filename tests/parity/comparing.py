"""What differs between two snapshots, apart from what may (see ``tests.parity``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.parity.snapshots import Snapshot

Difference = tuple[str, Any, Any]


def same_refusal(stock: dict[str, Any], candidate: dict[str, Any]) -> bool:
    """Whether the candidate refuses too, with stock's type where stock refuses on purpose."""
    theirs = candidate.get("raises", ())
    return stock["raises"][0] in theirs if stock["deliberate"] else bool(theirs)


def _agree(stock: Any, candidate: Any) -> bool:
    if isinstance(stock, dict) and "raises" in stock:
        return isinstance(candidate, dict) and same_refusal(stock, candidate)
    return bool(stock == candidate)


def compare(
    stock: Snapshot, candidate: Snapshot, where: str = "", nonsense: bool = False
) -> list[str]:
    """The differences, one readable line each; empty when the candidate passes.

    Parameters
    ----------
    where : str
        the beginning of each line: the configuration and the rank.
    nonsense : bool
        the configuration is one that may be refused whatever stock does.
    """
    ours, theirs = stock["outcome"], candidate["outcome"]
    if nonsense and theirs != "ok":
        return []
    found: list[Difference] = []
    if ours == theirs == "ok":
        found += _created(stock, candidate)
    elif "ok" in (ours, theirs) or not same_refusal(ours, theirs):
        found.append(("initialize_model_parallel", _brief(ours), _brief(theirs)))
    found += _answers(stock, candidate)
    for name in sorted(stock["groups"].keys() & candidate["groups"].keys()):
        if stock["groups"][name] != candidate["groups"][name]:
            found.append((f"the group of {name}", stock["groups"][name], candidate["groups"][name]))
    return [f"{where}{what}: stock {one}, candidate {other}" for what, one, other in found]


def _brief(outcome: Any) -> str:
    if outcome == "ok":
        return "accepts"
    return f"raises {outcome['raises'][0]} ({outcome.get('message', '')[:160]})"


def _created(stock: Snapshot, candidate: Snapshot) -> Iterator[Difference]:
    for made in sorted(stock["created"] | candidate["created"], key=repr):
        counts = stock["created"][made], candidate["created"][made]
        if counts[0] != counts[1]:
            yield f"created {made}", f"{counts[0]} times", f"{counts[1]} times"


def _answers(stock: Snapshot, candidate: Snapshot) -> Iterator[Difference]:
    """Differences in the steps that both came to."""
    before = stock["answers"]["before"]
    for step, answers in stock["answers"].items():
        theirs = candidate["answers"].get(step)
        for label, answer in answers.items() if theirs is not None else ():
            other = theirs.get(label, "<no answer>")
            if _agree(answer, other):
                continue
            if step == "after" and label in before and _agree(before[label], other):
                continue
            if label == "open groups":
                leaked = sorted(set(other) - set(answer))
                if not leaked:
                    continue
                answer, other = "closes these", f"leaves open {leaked}"
            yield f"{step}: {label}", answer, other
