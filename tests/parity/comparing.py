"""What differs between two snapshots, apart from what may (see ``tests.parity``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.parity.snapshots import Snapshot

Difference = tuple[str, Any, Any]


def same_refusal(stock: dict[str, Any], candidate: dict[str, Any]) -> bool:
    """Whether the candidate refuses too, with stock's type where stock refuses on purpose."""
    kinds = candidate.get("raises", ())
    return stock["raises"][0] in kinds if stock["deliberate"] else bool(kinds)


def agree(stock: Any, candidate: Any) -> bool:
    """Whether an answer of the candidate is right where stock answers so."""
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
    outcome = stock["outcome"]
    candidate_outcome = candidate["outcome"]
    if nonsense and candidate_outcome != "ok":
        return []
    differences: list[Difference] = []
    if outcome == candidate_outcome == "ok":
        differences += _created(stock, candidate)
    elif "ok" in (outcome, candidate_outcome) or not same_refusal(outcome, candidate_outcome):
        shown = (_outcome_text(outcome), _outcome_text(candidate_outcome))
        differences.append(("initialize_model_parallel", *shown))
    differences += _answers(stock, candidate)
    for name in sorted(stock["groups"].keys() & candidate["groups"].keys()):
        group = stock["groups"][name]
        candidate_group = candidate["groups"][name]
        if group != candidate_group:
            differences.append((f"the group of {name}", group, candidate_group))
    lines = []
    for what, stock_value, candidate_value in differences:
        lines.append(f"{where}{what}: stock {stock_value}, candidate {candidate_value}")
    return lines


def _outcome_text(outcome: Any) -> str:
    if outcome == "ok":
        return "accepts"
    return f"raises {outcome['raises'][0]} ({outcome.get('message', '')[:160]})"


def _created(stock: Snapshot, candidate: Snapshot) -> Iterator[Difference]:
    for group in sorted(stock["created"] | candidate["created"], key=repr):
        count = stock["created"][group]
        candidate_count = candidate["created"][group]
        if count != candidate_count:
            yield f"created {group}", f"{count} times", f"{candidate_count} times"


def _answers(stock: Snapshot, candidate: Snapshot) -> Iterator[Difference]:
    """Differences in the steps that both came to."""
    before = stock["answers"]["before"]
    for step, answers in stock["answers"].items():
        if step not in candidate["answers"]:
            continue
        for label, answer in answers.items():
            candidate_answer = candidate["answers"][step].get(label, "<no answer>")
            if agree(answer, candidate_answer):
                continue
            # What stock still holds after a destroy, the candidate may have forgotten.
            if step == "after" and label in before and agree(before[label], candidate_answer):
                continue
            if label == "open groups":
                leaked = sorted(set(candidate_answer) - set(answer))
                if leaked:
                    yield f"{step}: {label}", "closes these", f"leaves open {leaked}"
                continue
            yield f"{step}: {label}", answer, candidate_answer
