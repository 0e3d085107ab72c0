"""Runs the Python blocks of a page, on forked ranks of the world that the page asks for.

A line that ends in a comment with a value, as `layout.stride("dp")  # 4`, must give that value, on
every rank.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import tokenize
from typing import Any

import torch.distributed as dist

from tests.support import forked
from tests.support.pages import Block


def run(chain: list[Block]) -> None:
    """Run blocks that share a world and their names; a failure names the rank and the block."""
    world = chain[0].comments.get("run", "alone").split()[0]
    kind, _, size = world.partition("=")
    if kind in ("ranks", "torchrun"):
        _import(chain)
        backend = "gloo" if kind == "ranks" else ""
        forked.run_ranks(int(size), _on_rank, kind, chain, backend=backend, timeout=60)
    else:
        forked.run_ranks(1, _alone, kind, size, chain, backend="", timeout=60)


def _import(chain: list[Block]) -> None:
    """Import what the blocks import, once instead of on each rank."""
    for block in chain:
        for node in ast.parse(block.text).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                with contextlib.suppress(ImportError):  # the block itself raises it
                    exec(compile(ast.Module([node], []), "imports", "exec"), {})


def _on_rank(_: int, kind: str, chain: list[Block]) -> None:
    if kind == "torchrun":
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there, as under torchrun
    _run_blocks(chain)


def _alone(_: int, kind: str, size: str, chain: list[Block]) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    if kind == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=int(size), store=FakeStore())
    else:
        assert kind == "alone", f"invalid world: {kind!r}; allowed: alone, fake, ranks, torchrun"
    _run_blocks(chain)


def _run_blocks(chain: list[Block]) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in chain:
        given = block.comments.get("given", "")
        exec(compile(given, f"what is given to {block}", "exec"), namespace)
        _run_block(block, namespace)


def _run_block(block: Block, namespace: dict[str, Any]) -> None:
    comment_of_line = {}
    for token in tokenize.generate_tokens(io.StringIO(block.text).readline):
        if token.type == tokenize.COMMENT:
            comment_of_line[token.start[0]] = token.string.lstrip("# ")
    for node in ast.parse(block.text).body:
        if not isinstance(node, ast.Expr):
            exec(compile(ast.Module([node], []), str(block), "exec"), namespace)
            continue
        value = eval(compile(ast.Expression(node.value), str(block), "eval"), namespace)
        comment = comment_of_line.get(node.end_lineno or 0, "")
        try:
            promised = ast.literal_eval(comment)
        except (SyntaxError, ValueError):
            assert not comment.startswith(("[", "(", "{", "'", '"')), f"{comment} is no value"
            continue
        assert value == promised, f"{ast.unparse(node)} gives {value!r}, not {promised!r}"
