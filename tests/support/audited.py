"""Programs over megatron-core, audited on eight ranks; each prints what the ranks saw as JSON.

python -m tests.support.audited DIRECTORY PROGRAM ...
"""

import contextlib
import inspect
import json
import sys
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
    allowed = [f"{package}.layers", f"{package}.mappings", "is_initialized"]
    with critic.activate():
        head = Head(from_state(critic))
        with audit.forbid(f"{package}.*"):
            refused_reads = refused(lambda: head(x), audit.ForbiddenReadError)
        head(x)  # it has ended
        with audit.forbid(f"{package}.*", allow=allowed):
            loss = refused(lambda: head(x), audit.ForbiddenReadError)
        allowed.append(f"{package}.cross_entropy:get_tensor_*")
        with audit.forbid(f"{package}.*", allow=allowed):
            head(x)
        rule = audit.forbid(["no.such.module", "__main__"])
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


def every_getter(rank, directory):
    """Each audited function that needs no argument, once; and the names of those that answered."""
    ps.initialize_model_parallel(2, 2)
    getters = {name: vars(ps)[name] for name in AUDITED if name.startswith(("get_", "is_"))}
    answered = []
    with audit.recording(directory):
        for name, getter in getters.items():
            if all(p.default is not p.empty for p in inspect.signature(getter).parameters.values()):
                with contextlib.suppress(Exception):  # of a group that this layout lacks
                    getter()
                answered.append(name)
    return answered


def main(directory, *programs):
    """Each program has a directory of its own."""
    results = {}
    for name in programs:
        body = globals()[name]
        results[name] = forked.run_ranks(8, body, f"{directory}/{name}", timeout=100)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
