"""A grammar of edits of stock's ``parallel_state.py``: what vendors and branches do to it."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

Arguments = dict[str, Any]
ARGUMENTS: list[Arguments] = [
    {},
    {"tensor_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "order": "tp-pp-dp"},
    {"pipeline_model_parallel_size": 4},
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]},
    {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
    {"context_parallel_size": 2, "hybrid_context_parallel": True},
    {"num_distributed_optimizer_instances": 2},
    {"num_distributed_optimizer_instances": 2, "create_gloo_process_groups": False},
    {"create_gloo_process_groups": False},
    {"distributed_timeout_minutes": 7},
    {"gtp_remat_size": 2},
    {"expert_model_parallel_size": 2, "create_all_gather_group": True},
]
# Only with stand-ins for NCCL's options.
PRETENDED_ARGUMENTS: list[Arguments] = [
    {"high_priority_stream_groups": ["dp_cp", "ep_dp"], "tensor_model_parallel_size": 2},
]


class Edit(NamedTuple):
    """An edited text, the rule that made it, and whether the swap has to work beside it."""

    rule: str
    what: str
    text: str
    must_work: bool


class Text:
    """Stock's text and its tree, from which a rule chooses places."""

    def __init__(self, text: str, rng: random.Random) -> None:
        self.text, self.rng = text, rng
        self.tree = ast.parse(text)
        lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line.encode()))

    @cached_property
    def functions(self) -> list[ast.FunctionDef]:
        return [node for node in self.tree.body if isinstance(node, ast.FunctionDef)]

    @cached_property
    def getters(self) -> list[ast.FunctionDef]:
        names = ("get_", "is_")
        return [f for f in self.functions if f.name.startswith(names) and "nccl" not in f.name]

    @cached_property
    def initialise(self) -> ast.FunctionDef:
        return next(f for f in self.functions if f.name == "initialize_model_parallel")

    @cached_property
    def globals(self) -> list[str]:
        """Private globals that the initialisation sets."""
        names = set()
        for node in ast.walk(self.initialise):
            if isinstance(node, ast.Global):
                names |= set(node.names)
        return sorted(names)

    @cached_property
    def group_globals(self) -> list[str]:
        return [n for n in self.globals if "GROUP" in n and "GROUPS" not in n and "RANKS" not in n]

    @cached_property
    def creations(self) -> list[ast.Call]:
        """Calls of create_group in the initialisation."""
        return [
            node
            for node in ast.walk(self.initialise)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "create_group"
        ]

    def offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def span(self, node: Any) -> tuple[int, int]:
        start = self.offset(node.lineno, node.col_offset)
        return start, self.offset(node.end_lineno, node.end_col_offset)

    def put(self, node: Any, new: str) -> str:
        """The text with a node's text replaced."""
        start, end = self.span(node)
        raw = self.text.encode()
        return (raw[:start] + new.encode() + raw[end:]).decode()

    def before(self, node: Any, new: str) -> str:
        """The text with lines before a statement of the top."""
        line = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        lines = self.text.splitlines(keepends=True)
        return "".join([*lines[: line - 1], new, *lines[line - 1 :]])

    def at_end_of_initialisation(self, *statements: str) -> str:
        lines = self.text.splitlines(keepends=True)
        at = self.initialise.end_lineno
        assert at
        added = [f"    {statement}\n" for statement in statements]
        return "".join([*lines[:at], *added, *lines[at:]])

    def at_end(self, *statements: str) -> str:
        return self.text + "\n\n" + "\n".join(statements) + "\n"


Rule = Callable[[Text], "tuple[str, str] | None"]
RULES: list[tuple[Rule, bool]] = []


def rule(function: Rule) -> Rule:
    RULES.append((function, False))
    return function


def must_work(function: Rule) -> Rule:
    """A rule whose edits the swap must not refuse."""
    RULES.append((function, True))
    return function


def draw(text: str, rng: random.Random, pretend: bool) -> Edit:
    """An edit by a rule drawn at random, which applies to this text.

    A fake group has no timeout that could be read, and a real one on a CPU no options.
    """
    left_out = late_timeout if pretend else options_of_a_group
    while True:
        chosen, works = rng.choice(RULES)
        if chosen is left_out:
            continue
        made = chosen(Text(text, rng))
        if made is None or made[1] == text:
            continue
        try:
            compile(made[1], "edited", "exec")
        except SyntaxError:
            continue
        return Edit(chosen.__name__, made[0], made[1], works)


def draw_arguments(text: str, rng: random.Random, pretend: bool) -> Arguments:
    """Arguments that this text has."""
    pool = [*ARGUMENTS, *(PRETENDED_ARGUMENTS if pretend else [])]
    fitting = [a for a in pool if all(f"    {name}: " in text for name in a)]
    return rng.choice(fitting)


# Defaults.


def _defaults(function: ast.FunctionDef) -> list[tuple[str, ast.expr]]:
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    with_default = plain[len(plain) - len(arguments.defaults) :]
    return [(a.arg, d) for a, d in zip(with_default, arguments.defaults, strict=True)]


OTHER_TYPES = {
    "30": ["30.0", "np.int64(30)", "30 + 0"],
    "1": ["True", "1.0", "(1)"],
    "True": ["1", "1.0", "not False"],
    "False": ["0", "0.0", "None"],
    "0": ["False", "0.0"],
    "None": ["None or None", "()"],
}


@rule
def type_of_a_default_of_initialisation(text: Text) -> tuple[str, str] | None:
    name, default = text.rng.choice(_defaults(text.initialise))
    new = text.rng.choice(OTHER_TYPES.get(ast.unparse(default), ["'tp-cp-ep-dp' + '-pp'"]))
    return f"{name}={new}", text.put(default, new)


@must_work
def constant_default_of_another_type(text: Text) -> tuple[str, str] | None:
    numbers = {"30": ["30.0"], "1": ["True"], "True": ["1"], "False": ["0"]}
    pool = [(n, d) for n, d in _defaults(text.initialise) if ast.unparse(d) in numbers]
    name, default = text.rng.choice(pool)
    new = text.rng.choice(numbers[ast.unparse(default)])
    return f"{name}={new}", text.put(default, new)


@rule
def value_of_a_default_of_initialisation(text: Text) -> tuple[str, str] | None:
    name, default = text.rng.choice(_defaults(text.initialise))
    new = text.rng.choice(["2", "60", "False", "True", "None", "[2]", "'tp-pp-dp'", "0", "1"])
    return f"{name}={new}", text.put(default, new)


@rule
def none_that_means_another(text: Text) -> tuple[str, str] | None:
    pool = [(n, d) for n, d in _defaults(text.initialise) if ast.unparse(d) != "None"]
    name, default = text.rng.choice(pool)
    old = ast.unparse(default)
    changed = Text(text.put(default, "None"), text.rng)
    body = changed.initialise.body
    first = body[1] if isinstance(body[0], ast.Expr) else body[0]
    lines = f"    if {name} is None:\n        {name} = {old}\n"
    return f"{name}=None, meaning {old}", changed.before(first, lines)


@rule
def default_of_a_getter(text: Text) -> tuple[str, str] | None:
    function = text.rng.choice([f for f in text.getters if f.args.defaults])
    name, default = text.rng.choice(_defaults(function))
    new = text.rng.choice(["1", "True", "False", "None", "0", "0.0"])
    return f"{function.name}({name}={new})", text.put(default, new)


@rule
def parameter_more(text: Text) -> tuple[str, str] | None:
    function = text.rng.choice([*text.getters, text.initialise])
    arguments = function.args.args
    default = text.rng.choice(["None", "False", "()"])
    if not arguments:
        start, _ = text.span(function)
        here = text.text.encode()[start:].decode().replace("()", f"(vendor={default})", 1)
        return f"{function.name}(vendor)", text.text.encode()[:start].decode() + here
    last = function.args.defaults[-1] if function.args.defaults else arguments[-1]
    if arguments and not function.args.defaults and arguments[-1].annotation:
        last = arguments[-1].annotation
    return f"{function.name}(vendor)", text.put(last, f"{ast.unparse(last)}, vendor={default}")


# Getters.


def _returns(function: ast.FunctionDef) -> list[ast.expr]:
    return [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]


@rule
def type_of_a_getter(text: Text) -> tuple[str, str] | None:
    function = text.rng.choice([f for f in text.getters if _returns(f)])
    value = text.rng.choice(_returns(function))
    kind = text.rng.choice(["tuple", "list", "float", "int", "bool", "str", "np.int64"])
    return f"{function.name}: {kind}", text.put(value, f"{kind}({ast.unparse(value)})")


@rule
def value_of_a_getter(text: Text) -> tuple[str, str] | None:
    function = text.rng.choice([f for f in text.getters if _returns(f)])
    value = text.rng.choice(_returns(function))
    old = ast.unparse(value)
    new = text.rng.choice(
        [f"{old} + 1", f"({old})", "None", "0", "True", "False", "[]", f"{old} or None"]
    )
    return f"{function.name}: {new}", text.put(value, new)


@rule
def exception_of_a_getter(text: Text) -> tuple[str, str] | None:
    function = text.rng.choice([f for f in text.getters if _returns(f)])
    nodes = [n for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
    error = text.rng.choice(["KeyError", "AssertionError", "ValueError('x')"])
    return f"{function.name}: {error}", text.put(text.rng.choice(nodes), f"raise {error}")


@rule
def getter_of_another_global(text: Text) -> tuple[str, str] | None:
    pool = []
    for function in text.getters:
        for value in _returns(function):
            if isinstance(value, ast.Name) and value.id in text.globals:
                pool.append((function, value))
    function, value = text.rng.choice(pool)
    new = text.rng.choice(text.globals)
    return f"{function.name}: {new}", text.put(value, new)


@rule
def cached_getter(text: Text) -> tuple[str, str] | None:
    function = text.rng.choice(text.getters)
    new = text.before(function, "@functools.lru_cache(maxsize=None)\n")
    return function.name, "import functools\n" + new


@rule
def wrapped_getter(text: Text) -> tuple[str, str] | None:
    function = text.rng.choice(text.getters)
    convert = text.rng.choice(["value", "value", "float(value)", "(value,)"])
    helper = (
        "def _vendors(function):\n"
        "    @functools.wraps(function)\n"
        "    def wrapper(*args, **kwargs):\n"
        "        value = function(*args, **kwargs)\n"
        f"        return {convert}\n"
        "    return wrapper\n\n\n"
    )
    changed = text.before(function, f"{helper}@_vendors\n")
    return f"{function.name}: {convert}", "import functools\n" + changed


@must_work
def comment_and_docstring(text: Text) -> tuple[str, str] | None:
    function = text.rng.choice(text.getters)
    return function.name, text.before(function, "# A remark of the vendor's.\n")


# Groups.


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


@rule
def description(text: Text) -> tuple[str, str] | None:
    call = text.rng.choice(text.creations)
    value = _keyword(call, "group_desc")
    if value is None:
        return None
    other = _keyword(text.rng.choice(text.creations), "group_desc")
    new = text.rng.choice(["'VENDORS_GROUP'", ast.unparse(other) if other else "None", "None"])
    return f"{ast.unparse(value)} -> {new}", text.put(value, new)


@rule
def ranks_of_a_group(text: Text) -> tuple[str, str] | None:
    pool = []
    for node in ast.walk(text.initialise):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_ranks"):
            pool.append(node.args[0])
    token = text.rng.choice(pool)
    new = text.rng.choice(["tp", "dp", "pp", "tp-pp", "tp-dp", "dp-cp", "tp-dp-pp", "cp"])
    return f"{ast.unparse(token)} -> {new}", text.put(token, repr(new))


@rule
def timeout_of_a_group(text: Text) -> tuple[str, str] | None:
    call = text.rng.choice(text.creations)
    value = _keyword(call, "timeout")
    if value is None:
        return None
    new = text.rng.choice(["timedelta(minutes=7)", "None", "timeout * 2"])
    return f"{ast.unparse(call)[:80]}: {new}", text.put(value, new)


@rule
def backend_of_a_group(text: Text) -> tuple[str, str] | None:
    call = text.rng.choice(text.creations)
    value = _keyword(call, "backend")
    if value is not None:
        return "None", text.put(value, "None")
    desc = _keyword(call, "group_desc")
    if desc is None:
        return None
    return ast.unparse(desc), text.put(desc, f"{ast.unparse(desc)}, backend='gloo'")


@rule
def options_of_a_group(text: Text) -> tuple[str, str] | None:
    call = text.rng.choice(text.creations)
    value = _keyword(call, "pg_options")
    if value is None:
        return None
    new = text.rng.choice(
        [
            "None",
            "get_nccl_options('dp_cp', nccl_comm_cfgs)",
            "get_nccl_options('vendor', {'vendor': {'max_ctas': 4}})",
        ]
    )
    return f"{ast.unparse(call)[:60]}: {new}", text.put(value, new)


@rule
def group_less(text: Text) -> tuple[str, str] | None:
    call = text.rng.choice(text.creations)
    return ast.unparse(call)[:80], text.put(call, "None")


RANKS_MORE = ("[0, 1]", "[0, 1, 2, 3]", "[2, 3]", "list(range(world_size))")


@rule
def group_more(text: Text) -> tuple[str, str] | None:
    ranks = text.rng.choice(RANKS_MORE)
    how = text.rng.choice(
        [
            f"create_group({ranks}, timeout=timeout, group_desc='VENDORS_GROUP')",
            f"torch.distributed.new_group({ranks})",
            f"torch.distributed.distributed_c10d.new_group({ranks})",
            f"_vendors_new_group({ranks})",
        ]
    )
    target = text.rng.choice(["", "_VENDORS_GROUP = "])
    lines = ["global _VENDORS_GROUP"] if target else []
    changed = text.at_end_of_initialisation(*lines, f"{target}{how}")
    if "_vendors_new" in how:
        imported = "from torch.distributed import new_group as _vendors_new_group"
        changed = changed.replace("import torch\n", f"import torch\n{imported}\n", 1)
    return f"{target}{how}", changed


@rule
def alias(text: Text) -> tuple[str, str] | None:
    first, second = text.rng.sample(text.group_globals, 2)
    return f"{first} = {second}", text.at_end_of_initialisation(f"{first} = {second}")


@rule
def copy_in_place_of_a_group(text: Text) -> tuple[str, str] | None:
    name = text.rng.choice(text.group_globals)
    ranks = text.rng.choice(RANKS_MORE)
    desc = name.removeprefix("_")
    statement = f"{name} = create_group({ranks}, timeout=timeout, group_desc={desc!r})"
    return statement, text.at_end_of_initialisation(statement)


# Late changes.


@rule
def global_at_the_end(text: Text) -> tuple[str, str] | None:
    virtual = "_VIRTUAL_PIPELINE_MODEL_PARALLEL"
    numbers = [f"{virtual}_RANK", f"{virtual}_WORLD_SIZE", "_MPU_TENSOR_MODEL_PARALLEL_RANK"]
    numbers += ["_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", "_MPU_DATA_PARALLEL_RANK"]
    lists = [name for name in text.globals if "GLOBAL_RANKS" in name]
    if text.rng.random() < 0.6:
        name = text.rng.choice(numbers)
        new = text.rng.choice(["None", "0", "1", "0.0", "False", "3", "np.int64(0)"])
    else:
        name = text.rng.choice(lists)
        new = text.rng.choice([f"tuple({name} or ())", f"{name} and {name}[::-1]", "None", "[0]"])
        new = text.rng.choice([new, f"{name} and list(map(float, {name}))"])
    lines = [f"{name} = {new}"]
    if name not in text.globals:
        lines.insert(0, f"global {name}")
    return f"{name} = {new}", text.at_end_of_initialisation(*lines)


@rule
def virtual_rank_none(text: Text) -> tuple[str, str] | None:
    old = "        _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = 0"
    return "None", text.text.replace(old, old.replace("0", "None"))


@rule
def list_of_all_groups(text: Text) -> tuple[str, str] | None:
    name = "_global_process_group_list"
    values = (f"{name}[1:]", f"{name} + [None]", "None", f"tuple({name})", f"{name}[:1]")
    new = text.rng.choice(values)
    lines = (f"global {name}", f"{name} = {new}")
    return new, text.at_end_of_initialisation(*lines)


@rule
def environment(text: Text) -> tuple[str, str] | None:
    line = text.rng.choice(
        ["os.environ['VENDORS'] = '1'", "os.environ['NCCL_COLLNET_ENABLE'] = '0'"]
    )
    return line, text.at_end_of_initialisation(line)


@rule
def result_of_initialisation(text: Text) -> tuple[str, str] | None:
    value = text.rng.choice(["None", "True", "3", "world_size", ""])
    line = f"return {value}"
    return line, text.at_end_of_initialisation(line)


@rule
def late_description(text: Text) -> tuple[str, str] | None:
    name = text.rng.choice(text.group_globals)
    line = f"{name} and {name}._set_group_desc('VENDORS')"
    return line, text.at_end_of_initialisation(line)


@rule
def late_timeout(text: Text) -> tuple[str, str] | None:
    name = text.rng.choice(text.group_globals)
    set_timeout = "torch.distributed.distributed_c10d._set_pg_timeout"
    line = f"{name} and {set_timeout}(timedelta(minutes=11), {name})"
    return line, text.at_end_of_initialisation(line)


# Names.


@must_work
def new_group_by_name(text: Text) -> tuple[str, str] | None:
    module = text.rng.choice(["torch.distributed", "torch.distributed.distributed_c10d"])
    imported = f"from {module} import new_group"
    changed = text.text.replace("torch.distributed.new_group(", "new_group(")
    return imported, changed.replace("import torch\n", f"import torch\n{imported}\n", 1)


@must_work
def harmless_name(text: Text) -> tuple[str, str] | None:
    line = text.rng.choice(
        [
            "_log = logging.getLogger(__name__)",
            "from typing import TypeVar\nT = TypeVar('T')",
            "__all__ = ['initialize_model_parallel']",
            "_VENDORS_LIMIT = 8",
            "import json",
            "import functools as _functools",
            "from collections import OrderedDict",
            "if False:\n    def get_data_parallel_rank(vendor):\n        pass",
            "if False:\n    def get_router_group():\n        pass",
            "__version__ = '1'",
            "_log: logging.Logger = logging.getLogger('vendor')",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
        ]
    )
    if "logging" in line and "import logging" not in text.text:
        line = f"import logging\n{line}"
    if text.rng.random() < 0.5 and "__future__" not in text.text:
        return line, text.before(text.functions[0], f"{line}\n\n\n")
    return line, text.at_end(line)


@rule
def name_more(text: Text) -> tuple[str, str] | None:
    lines = text.rng.choice(
        [
            "def get_router_group():\n    return None",
            "def _get_router_group():\n    return None",
            "class Router:\n    pass",
            "NEW_SIZE = 4",
            "(NEW_SIZE := 4)",
            "for NEW_SIZE in range(3):\n    pass",
            "import os\nwith open(os.devnull) as NEW_FILE:\n    pass",
            "globals()['get_router_group'] = lambda: None",
            "globals()['NEW_SIZE'] = 4",
            "for _name in ('router', 'gate'):\n    globals()[f'get_{_name}_group'] = lambda: None",
            "import sys\nsys.modules[__name__].get_router_group = lambda: None",
            "import sys\nsetattr(sys.modules[__name__], 'NEW_SIZE', 4)",
            "vars().update(NEW_SIZE=4)",
            "from megatron.core.vendor import get_router_group",
            "from .vendor import get_router_group",
            "from .vendor import *",
            "get_router_group = get_data_parallel_group",
            "NEW_SIZE: int = 4",
            "NEW_SIZE = NEW_WIDTH = 4",
            "NEW_SIZE, NEW_WIDTH = 4, 5",
            "try:\n    import no_such_module\nexcept ImportError:\n    NEW_SIZE = 4",
        ]
    )
    return lines, text.at_end(lines)


@rule
def name_of_another(text: Text) -> tuple[str, str] | None:
    first, second = text.rng.sample([f.name for f in text.getters], 2)
    how = text.rng.choice(
        [
            f"{first} = {second}",
            f"globals()[{first!r}] = {second}",
            f"import sys\nsys.modules[__name__].{first} = {second}",
            f"for {first} in [{second}]:\n    pass",
            f"({first} := {second})",
            f"import functools\n{first} = functools.partial({second})",
            f"{first} = {first}",
            f"def {first}(*args, **kwargs):\n    return {second}(*args, **kwargs)",
            f"from .vendor import get_router_group as {first}",
        ]
    )
    return how, text.at_end(how)


@must_work
def name_less(text: Text) -> tuple[str, str] | None:
    names = [f.name for f in text.functions]
    unused = [name for name in names if text.text.count(f"{name}(") == 1]
    name = text.rng.choice([n for n in unused if n not in ("initialize_model_parallel",)])
    function = next(f for f in text.functions if f.name == name)
    if text.rng.random() < 0.5:
        return f"without {name}", text.put(function, "")
    return f"del {name}", text.at_end(f"del {name}")


@rule
def method(text: Text) -> tuple[str, str] | None:
    generator = next(
        n for n in text.tree.body if isinstance(n, ast.ClassDef) and n.name == "RankGenerator"
    )
    what = text.rng.choice(["base", "method", "attribute", "parameter"])
    if what == "base":
        old = text.text[text.text.index("class RankGenerator") :].splitlines()[0]
        base = text.rng.choice(["dict", "torch.nn.Module", "Exception"])
        return base, text.text.replace(old, f"class RankGenerator({base}):")
    if what == "parameter":
        old = "def get_ranks(self, token)"
        return what, text.text.replace(old, "def get_ranks(self, token=None)")
    members = {
        "method": "    def get_vendors_ranks(self):\n        return []\n\n",
        "attribute": "    vendor = 1\n\n",
    }
    first = next(n for n in generator.body if isinstance(n, ast.FunctionDef))
    return what, text.before(first, members[what])


@rule
def state_of_its_own(text: Text) -> tuple[str, str] | None:
    value = text.rng.choice([*text.group_globals, "3", "{}", "None"])
    lines = ("global _VENDORS_STATE", f"_VENDORS_STATE = {value}")
    return value, text.at_end_of_initialisation(*lines)


@rule
def global_less(text: Text) -> tuple[str, str] | None:
    name = text.rng.choice(text.group_globals)
    return f"del {name}", text.at_end_of_initialisation(f"del {name}")
