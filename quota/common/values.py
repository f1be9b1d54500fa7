"""Classes of values, cheap to make: a process that makes one decision makes seventy such classes first, and no value of
most of them. So nothing is compiled for a class before its first value.

    NamedTuple    as in `typing`
    Value         as a frozen dataclass
    field         what is special about a field of a Value
    replace       a copy of a Value with other fields
    new_tuple     makes a named tuple of all its fields, in half the time that its class takes

Modules that no cold start loads may use `dataclasses`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

new_tuple = tuple.__new__

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    from _collections import _tuplegetter

    class _Signature:
        def __init__(self, method):
            self._method = method

        def __get__(self, _value, cls):
            from inspect import signature

            cls._compile()
            full = signature(getattr(cls, self._method))
            return full.replace(parameters=list(full.parameters.values())[1:])

    class _Tuple(tuple):
        __slots__ = ()
        __signature__ = _Signature("__new__")

        def __new__(cls, /, *values, **named):
            cls._compile()
            return cls.__new__(cls, *values, **named)

        @classmethod
        def _compile(cls):
            parameters = [f"{name}=defaults[{name!r}]" if name in cls._field_defaults else name for name in cls._fields]
            scope = {"_new": tuple.__new__, "defaults": cls._field_defaults}  # no field begins with _
            values = "".join(f"{name}, " for name in cls._fields)
            code = f"def __new__({', '.join(['_cls', *parameters])}):\n return _new(_cls, ({values}))"
            cls.__new__ = staticmethod(_function(code, "__new__", cls, scope))

        @classmethod
        def _make(cls, values):
            made = tuple.__new__(cls, values)
            if len(made) != len(cls._fields):
                raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
            return made

        def _replace(self, /, **changes):
            made = self._make(map(changes.pop, self._fields, self))
            if changes:
                raise TypeError(f"Got unexpected field names: {list(changes)!r}")
            return made

        def _asdict(self):
            return dict(zip(self._fields, self, strict=True))

        def __getnewargs__(self):
            return tuple(self)

        def __repr__(self):
            shown = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
            return f"{type(self).__name__}({shown})"

    class _Named(type):
        def __new__(mcs, name, bases, members):
            if not bases:
                return super().__new__(mcs, name, bases, members)
            fields = tuple(members["__annotations__"])
            defaults = {field: members[field] for field in fields if field in members}
            members |= {field: _tuplegetter(index, None) for index, field in enumerate(fields)}
            members |= {"__slots__": (), "__match_args__": fields, "_fields": fields, "_field_defaults": defaults}
            return type(name, (_Tuple,), members)

    class NamedTuple(metaclass=_Named):
        pass


def _function(code: str, name: str, cls: type, scope: dict[str, Any]) -> Any:
    exec(code, scope)  # noqa: S102  # our own names
    function = scope[name]
    function.__module__, function.__qualname__ = cls.__module__, f"{cls.__qualname__}.{name}"
    return function


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

    _own: ClassVar[dict[str, _Field]]
    _given: ClassVar[tuple[str, ...]]
    _shown: ClassVar[tuple[str, ...]]
    _compared: ClassVar[attrgetter[Any]]

    def __init_subclass__(cls, *, frozen: bool = True) -> None:
        own = vars(cls)
        fields = {name: own.get(name, _REQUIRED) for name in own["__annotations__"]}
        fields = {name: one if isinstance(one, _Field) else _Field(one, True, True) for name, one in fields.items()}
        cls._own = fields
        cls._shown = tuple(fields)
        cls._given = tuple(name for name, one in fields.items() if one.init)
        cls._compared = attrgetter(*(name for name, one in fields.items() if one.compare))
        if not frozen:
            cls.__setattr__, cls.__delattr__ = object.__setattr__, object.__delattr__  # type: ignore[method-assign]

    if not TYPE_CHECKING:
        __signature__ = _Signature("__init__")

        def __init__(self, *values, **named):
            self._compile()
            self.__init__(*values, **named)

        def __setattr__(self, name, value):
            raise AttributeError(f"{type(self).__name__} is immutable: cannot assign or delete {name!r}")

        def __delattr__(self, name):
            self.__setattr__(name, None)

    @classmethod
    def _compile(cls) -> None:
        parameters, lines = ["self"], []
        for name in cls._given:
            default = cls._own[name].default
            parameters.append(name if default is _REQUIRED else f"{name}=fields[{name!r}].default")
            lines.append(f" _set(self, {name!r}, {name})")
        if "__post_init__" in vars(cls):
            lines.append(" self.__post_init__()")
        code = f"def __init__({', '.join(parameters)}):\n" + "\n".join(lines)
        init = _function(code, "__init__", cls, {"_set": object.__setattr__, "fields": cls._own})
        init.__annotations__ = {name: vars(cls)["__annotations__"][name] for name in cls._given}
        cls.__init__ = init  # type: ignore[method-assign]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return bool(self._compared(self) == self._compared(other))

    def __hash__(self) -> int:
        return hash(self._compared(self))

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._shown)
        return f"{type(self).__qualname__}({shown})"


T = TypeVar("T", bound=Value)


def replace(value: T, **changes: Any) -> T:
    """A copy of `value` with other fields, checked as a new one."""
    return type(value)(**{name: getattr(value, name) for name in value._given} | changes)
