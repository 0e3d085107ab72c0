"""Programs over megatron-core, audited on eight ranks; each prints what the ranks saw as JSON.

python -m tests.support.audited PROGRAM DIRECTORY [ARGUMENTS]
"""

import collections
import inspect
import json
import sys
import threading
import warnings

import compat

compat.install()
from compat.verification import on_cpu  # noqa: E402 - torch is adapted before megatron is imported

on_cpu.adapt()
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")

import torch  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear  # noqa: E402
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from compat import audit  # noqa: E402
from compat import parallel_state as ps  # noqa: E402
from compat.audit.getters import AUDITED  # noqa: E402
from compat.collection import from_state  # noqa: E402
from compat.state import ParallelState  # noqa: E402
from tests.support import forked  # noqa: E402

CONFIG = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 4}
HEAD = {"init_method": torch.nn.init.ones_, "bias": False}


class Head(torch.nn.Module):
    """A projection and the loss over its shards, which takes no group in any release."""

    def __init__(self, pg_collection=None):
        super().__init__()
        config = TransformerConfig(**CONFIG, use_cpu_initialization=True)
        group_argument = {} if pg_collection is None else {"tp_group": pg_collection.tp}
        self.config = config
        self.projection = ColumnParallelLinear(8, 16, config=config, **HEAD, **group_argument)
        # Since 0.19 the loss takes the group, and megatron-core's models pass it.
        self.taken = on_cpu.taken(vocab_parallel_cross_entropy, group_argument)

    def forward(self, x):
        logits, _ = self.projection(x)
        labels = torch.zeros(x.shape[:2], dtype=torch.long)
        return vocab_parallel_cross_entropy(logits, labels, **self.taken)


class Late(torch.autograd.Function):
    """Asks for a group in backward, as code that recomputes does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ps.get_tensor_model_parallel_world_size()


def two_states():
    actor = ParallelState.create(name="actor", tensor_model_parallel_size=2)
    return actor, ParallelState.create(name="critic", tensor_model_parallel_size=4)


def refused(call, kind):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def wrong_states(rank, directory):
    """A read of another state, one without activate(), one in backward after activate()."""
    actor, critic = two_states()
    x = torch.ones(3, 2, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with audit.recording(directory):
            with critic.activate():
                built = Head()
                built(x)
            head = Head(from_state(critic))
            with critic.activate():
                head(x)
            assert not [w for w in caught if w.category is RuntimeWarning]
            with actor.activate():
                built(x)
                head(x)
            refused(ps.get_context_parallel_group, AssertionError)
            with actor.activate():
                late = Late.apply(torch.ones(1, requires_grad=True))
            refused(late.sum().backward, AssertionError)
    warned = [str(w.message) for w in caught if w.category is RuntimeWarning]
    with audit.strict():
        with actor.activate():
            strict = refused(lambda: built(x), audit.WrongStateError)
        with critic.activate():
            built(x)
    return warned, strict


def cross_entropy(rank, directory):
    """A model that was handed critic's groups computes its loss while actor is current."""
    actor, critic = two_states()
    with audit.recording(directory):
        with critic.activate():
            head = Head(from_state(critic))
        with actor.activate():
            head(torch.ones(3, 2, 8))


def norm(rank, directory):
    """An optimizer that was handed critic's groups counts gradients while actor is current."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    actor, critic = two_states()
    handed = {"pg_collection": from_state(critic)}
    with audit.recording(directory):
        with critic.activate():
            head = Head(handed["pg_collection"])
            head.scale = torch.nn.Parameter(torch.ones(8))  # the same on tensor-parallel ranks
            config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
            model = DistributedDataParallel(head.config, config, head, **handed)
            optimizer_config = OptimizerConfig(lr=1e-3)
            no_gloo = on_cpu.taken(get_megatron_optimizer, {"use_gloo_process_groups": False})
            optimizer = get_megatron_optimizer(optimizer_config, [model], **no_gloo, **handed)
            for parameter in model.parameters():
                parameter.main_grad.fill_(1.0)
            optimizer.prepare_grads()
            right = float(optimizer.get_grad_norm())
        with actor.activate():
            wrong = float(optimizer.get_grad_norm())
    return right, wrong


def forbidden(rank, directory):
    """The same head where megatron.core.tensor_parallel may not read."""
    _, critic = two_states()
    x = torch.ones(3, 2, 8)
    package = "megatron.core.tensor_parallel"
    with critic.activate():
        head = Head(from_state(critic))
        with audit.forbid(f"{package}.*"):
            refused_reads = refused(lambda: head(x), audit.ForbiddenReadError)
        head(x)  # it has ended
        allowed = [f"{package}.layers", "megatron.core.tensor_parallel.mappings", "is_initialized"]
        with audit.forbid(f"{package}.*", allow=allowed):
            loss = refused(lambda: head(x), audit.ForbiddenReadError)
        with audit.forbid(
            f"{package}.*", allow=[*allowed, f"{package}.cross_entropy:get_tensor_*"]
        ):
            head(x)
        rule = audit.forbid(["no.such.module", "tests.support.*", "__main__"])
        private = refused(lambda: ps._TENSOR_MODEL_PARALLEL_GROUP, audit.ForbiddenReadError)
        rule.end()
        rule.end()
        assert ps._TENSOR_MODEL_PARALLEL_GROUP is not None
    return refused_reads, loss, private


def private_globals(rank, directory):
    """Reads and writes of private globals, and of a getter imported by name before recording."""
    from compat.parallel_state import get_context_parallel_world_size as by_name

    with audit.recording(directory):
        ps.is_initialized()
    ps.initialize_model_parallel(tensor_model_parallel_size=4)
    before = {name: vars(ps)[name].__code__ for name in AUDITED if name in vars(ps)}
    with audit.recording(directory):
        by_name()
        ps._TENSOR_MODEL_PARALLEL_GROUP  # noqa: B018
        from compat.parallel_state import _CONTEXT_PARALLEL_GROUP  # noqa: F401

        ps._MPU_TENSOR_MODEL_PARALLEL_RANK = 3
        assert ps.get_tensor_model_parallel_rank() == 3
        ps.set_tensor_model_parallel_rank(None)
        ps.current_state().get_data_parallel_rank()  # of a state, not of the module
    after = {name: vars(ps)[name].__code__ for name in before}
    assert all(before[name] is after[name] for name in before)
    return type(ps).__name__, "_hypergrid_audit" in vars(ps), torch.nn.Module.__init__.__module__


def counted(rank, directory, arguments):
    """The demo's training without the audit, each call of a getter counted by sys.setprofile."""
    from scripts import train_gpt

    # As they are written: a wrapper may take the arguments of the release.
    getters = {name: inspect.unwrap(vars(ps)[name]) for name in AUDITED if name in vars(ps)}
    codes = {getter.__code__: name for name, getter in getters.items()}
    counts = collections.Counter()
    home = f"{compat.__path__[0]}/"

    def profile(frame, event, _):
        if event != "call" or frame.f_code not in codes:
            return
        caller = frame.f_back
        while caller.f_code.co_name == "released":
            caller = caller.f_back
        if not caller.f_code.co_filename.startswith((home, "<string>")):
            counts[codes[frame.f_code]] += 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        train_gpt.main(arguments)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counts


def recorded(rank, directory, arguments):
    """The demo's training, recorded."""
    from scripts import train_gpt

    with audit.recording(directory):
        train_gpt.main(arguments)


def main(directory, *programs):
    """Each program has a directory of its own; the demo's arguments follow its name."""
    results = {}
    for program in programs:
        name, *arguments = program.split()
        program_arguments = [f"{directory}/{name}", *([arguments] if arguments else [])]
        body = globals()[name]
        results[program] = forked.run_ranks(
            getattr(body, "world", 8), body, *program_arguments, timeout=100
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
