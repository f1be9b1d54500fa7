"""Classes of values, cheap to make: a process that makes one decision makes seventy such classes first.

    NamedTuple    as in `typing`, which compiles every annotation; nobody here reads them
    Value         as a frozen dataclass: `dataclasses` compiles six methods for each class, this compiles one
    field         what is special about a field of a Value
    replace       a copy of a Value with other fields

Modules that no cold start loads may use `dataclasses`.
"""

from __future__ import annotations

from collections import namedtuple
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:

    class _Named(type):
        def __new__(mcs, name, bases, members):
            if not bases:
                return super().__new__(mcs, name, bases, members)
            annotations = members["__annotations__"]
            defaults = [members.pop(field) for field in annotations if field in members]
            made = namedtuple(name, annotations, defaults=defaults)
            for key, value in members.items():
                setattr(made, key, value)
            return made

    class NamedTuple(metaclass=_Named):
        pass


_REQUIRED: Any = object()


class _Field(NamedTuple):
    default: Any
    init: bool
    compare: bool


def field(*, default: Any = _REQUIRED, init: bool = True, compare: bool = True) -> Any:
    """`init`: given to `__init__`; else `__post_init__` sets it. `compare`: equal values have it in common."""
    return _Field(default, init, compare)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value:
    """Its fields are the annotations of its class, which is not derived from another one. `__post_init__` may check and
    convert them with `object.__setattr__`. With `frozen=False` they may be assigned."""

    _given: ClassVar[tuple[str, ...]]
    _shown: ClassVar[tuple[str, ...]]
    _compared: ClassVar[attrgetter[Any]]

    def __init_subclass__(cls, *, frozen: bool = True) -> None:
        own = vars(cls)
        fields = {name: own.get(name, _REQUIRED) for name in own["__annotations__"]}
        fields = {name: one if isinstance(one, _Field) else _Field(one, True, True) for name, one in fields.items()}
        cls._shown = tuple(fields)
        cls._given = tuple(name for name, one in fields.items() if one.init)
        cls._compared = attrgetter(*(name for name, one in fields.items() if one.compare))
        parameters, lines = ["self"], []
        for name in cls._given:
            default = fields[name].default
            parameters.append(name if default is _REQUIRED else f"{name}=fields[{name!r}].default")
            lines.append(f" set(self, {name!r}, {name})")
        if "__post_init__" in own:
            lines.append(" self.__post_init__()")
        scope: dict[str, Any] = {"set": object.__setattr__, "fields": fields}
        exec(f"def __init__({', '.join(parameters)}):\n" + "\n".join(lines), scope)  # noqa: S102  # our own names
        init = cls.__init__ = scope["__init__"]  # type: ignore[method-assign]
        init.__qualname__ = f"{cls.__qualname__}.__init__"
        init.__annotations__ = {name: own["__annotations__"][name] for name in cls._given}
        if frozen:
            cls.__setattr__ = cls.__delattr__ = _refuse  # type: ignore[method-assign]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return bool(self._compared(self) == self._compared(other))

    def __hash__(self) -> int:
        return hash(self._compared(self))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._shown)
        return f"{type(self).__qualname__}({shown})"


def _refuse(self: object, name: str, *_value: object) -> None:
    raise AttributeError(f"{type(self).__name__} is immutable: cannot assign or delete {name!r}")


T = TypeVar("T", bound=Value)


def replace(value: T, **changes: Any) -> T:
    """A copy of `value` with other fields, checked as a new one."""
    return type(value)(**{name: getattr(value, name) for name in value._given} | changes)
