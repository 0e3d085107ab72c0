"""Methods of the state that follow from their names: written as source once, as dataclasses do."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch.distributed as dist

from compat.megatron.releases import HAS

T = TypeVar("T", covariant=True)


def missing(slot: str) -> AssertionError:
    """The error for a group that does not exist."""
    name = slot.strip("_").replace("_", " ").lower()
    return AssertionError(
        f"{name} is not initialized: no model parallel state with such a group is current. Call "
        f"initialize_model_parallel() first, with the sizes that make this group."
    )


class Method(Generic[T]):
    """A method that follows from its name and a private global, the name's own unless given.

    ``get_context_parallel_group`` is about ``_CONTEXT_PARALLEL_GROUP``. The source has no loop and
    no look-up by name: getters are called millions of times.
    """

    source = ""

    def __init__(self, slot: str = "") -> None:
        self.slot = slot

    def __set_name__(self, owner: type, name: str) -> None:
        what = name.partition("_")[2]
        value = "rank" if name.endswith("_rank") else "world_size"
        slot = self.slot or f"_{what}".upper()
        scope = {"missing": missing, "this": self}
        exec(self.source.format(name=name, slot=slot, what=what, value=value), scope)
        method: Any = scope[name]
        method.__module__, method.__qualname__ = owner.__module__, f"{owner.__qualname__}.{name}"
        setattr(owner, name, method)

    if TYPE_CHECKING:

        def __get__(self, state: Any, owner: type | None = None) -> Callable[..., T]: ...


class Held(Method[T]):
    """A group, or the ranks of one: AssertionError where there is none."""

    source = """
def {name}(self, check_initialized=True):
    if (value := self.{slot}) is None and check_initialized:
        raise missing("{slot}")
    return value
"""


class First(Method[int]):
    """The first of the ranks of a group."""

    source = """
def {name}(self):
    return self._held("{slot}")[0]
"""


class Read(Method[T]):
    """The global as it is."""

    source = """
def {name}(self):
    return self.{slot}
"""


class Written(Method[None]):
    """Sets the global."""

    source = """
def {name}(self, {value}):
    self.{slot} = {value}
"""


class Number(Method[int]):
    """A rank or a size: an attribute of the state, or None there where only the group can tell.

    ``ask`` finds it then. A setter can write ``override``, a private global.
    """

    source = """
def {name}(self):
    number = self._{what}
    return number if number is not None else this.ask(self, this)
"""

    def __init__(self, ask: Callable[[Any, Number], int], *, settable: bool = False) -> None:
        super().__init__()
        self.ask, self.settable = ask, settable

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        what = name.removeprefix("get_")
        self.attribute = f"_{what}"
        self.kind = "rank" if what.endswith("_rank") else "size"  # the group's own methods
        self.getter = f"get_{what.removesuffix('_rank').removesuffix('_world_size')}_group"
        self.group = self.getter.removeprefix("get").upper()
        self.override = f"_MPU_{what.upper()}" if self.settable else None
        NUMBERS.append(self)


NUMBERS: list[Number] = []


def number_of(group: Any, kind: str, from_torch: bool = False) -> int:
    # An encoder's rank is in several pipelines, at the same stage of each.
    group = group[0] if isinstance(group, list) else group
    if from_torch or HAS["numbers_from_torch"]:
        number: int = dist.get_rank(group) if kind == "rank" else dist.get_world_size(group)
        return number
    return getattr(group, kind)()  # type: ignore[no-any-return]


# The groups come from the getters, and not from their globals: outside code may have replaced
# a getter in the module, and then its answer counts.


def of_group(state: Any, number: Number) -> int:
    return number_of(getattr(state._via, number.getter)(), number.kind)


def or_zero(state: Any, number: Number) -> int:
    """0 before torch.distributed is initialised."""
    return of_group(state, number) if dist.is_initialized() else 0


def or_zero_without(state: Any, number: Number) -> int:
    """0 also where there is no such group."""
    if not dist.is_initialized():
        return 0
    group = getattr(state._via, number.getter)(check_initialized=False)
    return 0 if group is None else number_of(group, number.kind)


def of_expert_tensor(state: Any, number: Number) -> Any:
    """What was set for tensor parallelism where there is no such group."""
    if getattr(state, number.group) is not None:
        return or_zero(state, number)
    if number.kind == "rank":
        return state._MPU_TENSOR_MODEL_PARALLEL_RANK
    return state._MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE


def of_stage(state: Any, number: Number) -> int:
    if HAS["stage_asks_torch"]:
        dist.get_rank()
    return number_of(getattr(state._via, number.getter)(), "rank", HAS["stage_from_torch"])
