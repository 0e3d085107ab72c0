"""Run the Python blocks of pages, each chain in its own processes; print their errors as JSON.

    python -m tests.support.run_pages < CHAINS

CHAINS: `[{"world": "ranks=8", "steps": [[where, given, code]]}]`.

A line that ends in a comment with a value, as `layout.stride("dp")  # 4`, must give that value, on
every rank.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import tokenize
import traceback
from typing import Any

import torch  # noqa: F401 - once, not in each process
import torch.distributed as dist

import compat.colossalai
import compat.parallel_state  # noqa: F401
from tests.support import forked, warm

Steps = list[tuple[str, str, str]]


def run(steps: Steps) -> list[str]:
    """Run the blocks in one namespace; for each its error, or an empty text."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    errors: list[str] = []
    for where, preamble, code in steps:
        if any(errors):
            errors.append("not reached: an earlier block of this page failed")
            continue
        try:
            exec(compile(preamble, f"what is given to {where}", "exec"), namespace)
            _run_block(where, code, namespace)
            errors.append("")
        except BaseException:
            errors.append(traceback.format_exc())
    return errors


def _run_block(where: str, code: str, space: dict[str, Any]) -> None:
    comment_of_line = {}
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            comment_of_line[token.start[0]] = token.string.lstrip("# ")
    for node in ast.parse(code).body:
        if not isinstance(node, ast.Expr):
            exec(compile(ast.Module([node], []), where, "exec"), space)
            continue
        value = eval(compile(ast.Expression(node.value), where, "eval"), space)
        comment = comment_of_line.get(node.end_lineno or 0, "")
        try:
            promised = ast.literal_eval(comment)
        except (SyntaxError, ValueError):
            if comment[:1] in tuple("[({'\""):
                raise ValueError(f"{comment} looks like a value and cannot be read") from None
            continue
        if value != promised:
            raise AssertionError(f"{ast.unparse(node)} gives {value!r}, the page says {promised!r}")


def _alone(world: str, steps: Steps) -> list[str]:
    if world != "alone":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = int(world.removeprefix("fake="))
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    with tempfile.TemporaryDirectory() as home:
        os.chdir(home)
        return run(steps)


def _on_rank(_: int, steps: Steps) -> list[str]:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there, as under torchrun
    return run(steps)


def _on_ranks(world: str, steps: Steps) -> list[str]:
    """The first error of each block, with its rank."""
    for _, preamble, code in steps:  # import it once here, not on every rank
        for node in (*ast.parse(preamble).body, *ast.parse(code).body):
            if isinstance(node, ast.Import | ast.ImportFrom):
                with contextlib.suppress(ImportError):  # the block itself raises it
                    exec(compile(ast.Module([node], []), "imports", "exec"), {})
    kind, _, size = world.partition("=")
    backend = "gloo" if kind == "ranks" else ""
    first_errors = [""] * len(steps)
    for rank, errors in enumerate(forked.run_ranks(int(size), _on_rank, steps, backend=backend)):
        for place, error in enumerate(errors):
            if error and not first_errors[place]:
                first_errors[place] = f"rank {rank}: {error}"
    return first_errors


WORLDS = {"alone": _alone, "fake": _alone, "ranks": _on_ranks, "torchrun": _on_ranks}


def chain(world: str, steps: Steps) -> list[str]:
    """Run a chain, in a process of its own, in the world that its page asks for."""
    kind = world.partition("=")[0]
    if kind not in WORLDS:
        return [f"invalid world: {world!r}; allowed: {', '.join(WORLDS)}"] * len(steps)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            errors = WORLDS[kind](world, steps)
        except forked.RankFailure as failure:
            errors = [str(failure)] * len(steps)
        os.write(writing, json.dumps(errors).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else ["the process ended without a result"] * len(steps)


def main() -> None:
    """Print the errors on the standard output; the output of the blocks goes to standard error."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warm.preload()
    errors = [chain(**page_chain) for page_chain in json.load(sys.stdin)]
    json.dump(errors, answer)


if __name__ == "__main__":
    main()
