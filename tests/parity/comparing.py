"""What differs between two snapshots, apart from what may (see ``tests.parity``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Snapshot = dict[str, Any]
Difference = tuple[str, Any, Any]
UNKNOWN = "unknown"  # the outcome where stock was not asked, or hangs


def same_refusal(stock: dict[str, Any], candidate: dict[str, Any]) -> bool:
    """Whether the candidate refuses too, with stock's type where stock refuses on purpose."""
    kinds = candidate.get("raises", ())
    return stock["raises"][0] in kinds if stock["deliberate"] else bool(kinds)


def agree(stock: Any, candidate: Any, is_written_to: bool = False) -> bool:
    """Whether an answer of the candidate is right where stock answers so.

    Where outside code writes and replaces, stock may stumble over a value with a TypeError.
    """
    if not (isinstance(stock, dict) and "raises" in stock):
        return bool(stock == candidate)
    if is_written_to and stock["raises"][0] == "TypeError":
        return True
    return isinstance(candidate, dict) and same_refusal(stock, candidate)


def compare(
    stock: Snapshot,
    candidate: Snapshot,
    where: str = "",
    nonsense: bool = False,
    is_written_to: bool = False,
) -> list[str]:
    """The differences, one readable line each; empty when the candidate passes.

    Parameters
    ----------
    where : str
        the beginning of each line: the configuration and the rank.
    nonsense : bool
        the configuration is one that may be refused whatever stock does.
    is_written_to : bool
        as for `agree`
    """
    outcome = stock["outcome"]
    candidate_outcome = candidate["outcome"]
    differences: list[Difference] = []
    # Stock has not said what is right, or lets pass by mistake what the candidate refuses.
    is_free = outcome == UNKNOWN or (nonsense and candidate_outcome != "ok")
    if outcome == candidate_outcome == "ok":
        differences += _created(stock, candidate)
    elif is_free:
        pass
    elif "ok" in (outcome, candidate_outcome) or not same_refusal(outcome, candidate_outcome):
        shown = (_outcome_text(outcome), _outcome_text(candidate_outcome))
        differences.append(("initialize_model_parallel", *shown))
    differences += _answers(stock, candidate, is_written_to)
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


def _answers(stock: Snapshot, candidate: Snapshot, is_written_to: bool) -> Iterator[Difference]:
    """Differences in the steps that both came to."""
    before = stock["answers"]["before"]
    for step, answers in stock["answers"].items():
        if step not in candidate["answers"]:
            continue
        for label, answer in answers.items():
            candidate_answer = candidate["answers"][step].get(label, "<no answer>")
            # What stock still holds after a destroy, the candidate may have forgotten.
            allowed = [answer]
            if "destroyed" in step and label in before:
                allowed.append(before[label])
            if any(agree(value, candidate_answer, is_written_to) for value in allowed):
                continue
            if label.endswith("open groups"):
                leaked = sorted(set(candidate_answer) - set(answer))
                if leaked:
                    yield f"{step}: {label}", "closes these", f"leaves open {leaked}"
                continue
            yield f"{step}: {label}", answer, candidate_answer
