"""Trains the same model on stock parallel_state and on ours, and compares them bit for bit.

    python scripts/compare_training.py                     # the demo's two models
    python scripts/compare_training.py --run "--cp 2 --tp 2" --run "--pp 4 --vp 2"

Eight ranks over gloo on the CPU; each side is a process of its own that imports megatron once and
forks the ranks. Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkout import in_fresh_process

MODELS = {
    "dense: tp=2 pp=2 dp=2": "--tp 2 --pp 2",
    "mixture of experts: tp=2 pp=2 ep=2": (
        "--tp 2 --pp 2 --ep 2 --num-experts 4 --sequence-parallel"
    ),
}
Results = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--run", action="append", help="arguments of train_gpt.py; repeatable")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--order", help="let the swap override the order, stock is passed it")
    options = parser.parse_args()
    models = MODELS
    if options.run:
        models = dict(zip(options.run, options.run, strict=True))
    stock = run_side("stock", options, models)
    swapped = run_side("hypergrid", options, models)
    are_equal = [*map(show, models, stock, swapped)]
    return 0 if all(are_equal) else 1


def run_side(side: str, options: argparse.Namespace, models: dict[str, str]) -> list[Results]:
    """Train all models on one side, in a fresh interpreter."""
    print(f"training on {side} ...", flush=True)
    variables = {"CUDA_VISIBLE_DEVICES": ""}
    runs = list(models.values())
    # Stock's script passes the order itself, ours gets it from the launcher's variable.
    if options.order and side == "stock":
        runs = [f"{arguments} --order {options.order}" for arguments in runs]
    elif options.order:
        variables["HYPERGRID_ORDER"] = options.order
    with mock.patch.dict(os.environ, variables):
        return in_fresh_process(train, side, runs, options.ranks, options.steps)


def train(side: str, runs: list[str], ranks: int, steps: int) -> list[Results]:
    """Train in this process's children, with or without the swap; rank 0's results of each run."""
    if side == "hypergrid":
        import compat

        compat.install()
    import train_gpt

    from tests.support import forked

    results = []
    for arguments in runs:
        line = [*shlex.split(arguments), "--steps", str(steps)]
        try:
            of_ranks = forked.run_ranks(
                ranks, lambda _, line=line: train_gpt.main(line), timeout=600
            )
        except forked.RankFailure as failure:
            sys.exit(f"{side}, {arguments or 'no arguments'}: {failure.line}")
        results.append(of_ranks[0])
    return results


def exact_results(results: Results) -> tuple[list[str], list[str]]:
    """The loss of each step, and every rank's digest of losses, gradient norms and parameters."""
    return [step["loss_hex"] for step in results["steps"]], results["rank_digests"]


def show(title: str, stock: Results, swapped: Results) -> bool:
    """Print both sides next to each other; whether they are equal to the last bit."""
    print(f"\n{title}, {stock['world_size']} ranks\n  step  stock loss   hypergrid loss")
    for number, stock_step in enumerate(stock["steps"]):
        swapped_step = swapped["steps"][number]
        verdict = "=" if stock_step["loss_hex"] == swapped_step["loss_hex"] else "DIFFERS"
        losses = f"{stock_step['loss']:<11.8f}  {swapped_step['loss']:<11.8f}"
        print(f"  {number + 1:>4}  {losses}  {verdict}")
    is_equal = exact_results(stock) == exact_results(swapped)
    for key in ("live_groups", "new_group_calls"):
        print(f"  {key} of a rank: stock {max(stock[key])}, hypergrid {max(swapped[key])}")
    verdict = "equal to the last bit" if is_equal else "DIFFERENT"
    print(f"  every rank's losses, gradient norms and parameters: {verdict}", flush=True)
    return is_equal


if __name__ == "__main__":
    sys.exit(main())
