"""Trains the same model on stock parallel_state and on ours, and compares them bit for bit.

    python scripts/compare_training.py                     # the demo's two models
    python scripts/compare_training.py --run "--cp 2 --tp 2" --run "--pp 4 --vp 2"

Eight ranks over gloo on the CPU; each side is a process of its own that imports megatron once and
forks the ranks. Exit status 1 when anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
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
    parser.add_argument("--side", choices=("stock", "hypergrid"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    models = {arguments: arguments for arguments in options.run or []} or MODELS
    if options.side:
        try:
            results = train(options.side, list(models.values()), options.ranks, options.steps)
        except KeyboardInterrupt:
            return 130
        options.out.write_text(json.dumps(results))
        return 0
    stock, ours = (run_side(side, options, models) for side in ("stock", "hypergrid"))
    equal = [show(*each) for each in zip(models, stock, ours, strict=True)]
    return 0 if all(equal) else 1


def run_side(side: str, options: argparse.Namespace, models: dict[str, str]) -> list[Results]:
    """Train all models on one side, in a fresh interpreter."""
    print(f"training on {'stock' if side == 'stock' else 'hypergrid'} ...", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "results.json")
        command = [sys.executable, __file__, "--side", side, "--out", str(out)]
        command += ["--ranks", str(options.ranks), "--steps", str(options.steps)]
        order = f" --order {options.order}" if options.order and side == "stock" else ""
        command += [f"--run={arguments}{order}" for arguments in models.values()]
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HERE.parent)]))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        if options.order and side == "hypergrid":
            environment["HYPERGRID_ORDER"] = options.order
        done = subprocess.run(command, env=environment)
        if done.returncode:
            sys.exit(done.returncode)
        results: list[Results] = json.loads(out.read_text())
        return results


def train(side: str, runs: list[str], ranks: int, steps: int) -> list[Results]:
    """Train in this process's children, with or without the swap."""
    if side == "hypergrid":
        import compat

        compat.install()
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import train_gpt

    from compat.swap import stray_bindings
    from tests.support import forked

    assert side == "stock" or not stray_bindings(), stray_bindings()
    results = []
    for arguments in runs:
        argv = [*shlex.split(arguments), "--steps", str(steps)]
        try:
            per_rank = forked.run_ranks(ranks, lambda _, a=argv: train_gpt.main(a), timeout=600)
        except forked.RankFailure as failure:
            sys.exit(f"{side}, {arguments or 'no arguments'}: {failure.line}")
        results.append(per_rank[0])
    return results


def show(title: str, stock: Results, ours: Results) -> bool:
    """Print both sides next to each other; whether they are equal to the last bit."""
    print(f"\n{title}, {stock['world_size']} ranks\n  step  stock loss   hypergrid loss")
    for i, (theirs, mine) in enumerate(zip(stock["steps"], ours["steps"], strict=True), start=1):
        mark = "=" if theirs["loss_hex"] == mine["loss_hex"] else "DIFFERS"
        print(f"  {i:>4}  {theirs['loss']:<11.8f}  {mine['loss']:<11.8f}  {mark}")
    losses = [[step["loss_hex"] for step in side["steps"]] for side in (stock, ours)]
    equal = losses[0] == losses[1]
    same = stock["rank_digests"] == ours["rank_digests"]
    print(f"  losses equal to the last bit: {'yes' if equal else 'NO'}")
    print(f"  every rank's losses, gradient norms and parameters: {'equal' if same else 'DIFFER'}")
    print(f"  {'':32}{'stock':>10}{'hypergrid':>12}")
    for what, key in (
        ("groups per rank", "live_groups"),
        ("new_group calls per rank", "new_group_calls"),
    ):
        print(f"  {what:32}{max(stock[key]):>10}{max(ours[key]):>12}")
    what = "initialize_model_parallel"
    print(f"  {what:32}{stock['init_seconds']:>8.2f} s{ours['init_seconds']:>10.2f} s", flush=True)
    return equal and same


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
