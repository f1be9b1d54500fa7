"""Our classes of values behave like those of `typing` and `dataclasses`, which take longer to make."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import typing

import pytest

from quota.common.values import NamedTuple, Value, field, replace


class Pair(NamedTuple):
    """Two numbers."""

    left: int
    right: int = 2

    @property
    def sum(self) -> int:
        return self.left + self.right


class TypingPair(typing.NamedTuple):
    """Two numbers."""

    left: int
    right: int = 2


class Span(Value):
    """From `start` up to `end`."""

    start: int
    end: int = 9
    length: int = field(init=False, compare=False)
    note: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.end < self.start:
            raise ValueError(f"{self.end} is before {self.start}")
        object.__setattr__(self, "length", self.end - self.start)


@dataclasses.dataclass(frozen=True)
class DataSpan:
    start: int
    end: int = 9
    note: str = dataclasses.field(default="", compare=False)


class Tally(Value, frozen=False):
    count: int


def test_a_named_tuple_is_that_of_typing() -> None:
    one = Pair(1)
    assert (one, one.sum, repr(one), one._replace(left=5)) == ((1, 2), 3, "Pair(left=1, right=2)", Pair(5, 2))
    for attribute in ("_fields", "_field_defaults", "__doc__", "__module__", "__slots__"):
        assert getattr(Pair, attribute) == getattr(TypingPair, attribute)
    assert [*inspect.signature(Pair).parameters] == ["left", "right"]
    assert one._asdict() == TypingPair(1)._asdict()
    assert Pair._make([1, 2]) == TypingPair._make([1, 2])
    match one:
        case Pair(left, right):
            assert (left, right) == (1, 2)
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301  # just written
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'left'"):
        Pair()  # type: ignore[call-arg]
    for wrong in (lambda: one._replace(middle=1), lambda: Pair._make([1]), lambda: setattr(one, "left", 2)):
        with pytest.raises((TypeError, AttributeError), match=r"unexpected field names|Expected 2 arguments|can't set"):
            wrong()


def test_a_value_is_equal_to_one_of_its_class_with_the_same_fields() -> None:
    one, same = Span(1, note="first"), Span(start=1, end=9, note="other")
    assert one == same
    assert hash(one) == hash(same) == hash(DataSpan(1))
    assert one != Span(2)
    assert one != DataSpan(1)
    assert one != (1, 9)
    assert one.length == 8
    assert pickle.loads(pickle.dumps(one)) == one  # noqa: S301  # just written


def test_a_value_shows_its_fields() -> None:
    assert repr(Span(1)) == "Span(start=1, end=9, length=8, note='')"
    assert str(inspect.signature(Span)) == "(start: 'int', end: 'int' = 9, note: 'str' = '')"
    assert str(inspect.signature(DataSpan)).startswith(str(inspect.signature(Span)))


def test_a_value_is_made_of_its_fields_alone() -> None:
    with pytest.raises(TypeError, match=r"Span\.__init__\(\) missing 1 required positional argument: 'start'"):
        Span()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Span\.__init__\(\) got an unexpected keyword argument 'length'"):
        Span(1, length=3)  # type: ignore[call-arg]


def test_a_value_cannot_be_changed_unless_its_class_says_so() -> None:
    one = Span(1)
    for change in (lambda: setattr(one, "end", 5), lambda: setattr(one, "other", 5), lambda: delattr(one, "end")):
        with pytest.raises(AttributeError, match=r"Span is immutable: cannot assign or delete '(end|other)'"):
            change()
    assert one == Span(1)
    tally = Tally(1)
    tally.count += 1
    assert tally == Tally(2)


def test_a_copy_with_other_fields_is_checked_like_a_new_value() -> None:
    assert replace(Span(1, note="x"), end=3) == Span(1, 3)
    assert replace(Span(1, note="x"), end=3).note == "x"
    assert replace(Span(1), end=3).length == 2
    with pytest.raises(ValueError, match="0 is before 1"):
        replace(Span(1), end=0)


def test_a_field_may_be_called_like_what_makes_the_value() -> None:
    class Pair(NamedTuple):
        new: int
        defaults: int = 2

    class Kept(Value):
        set: int
        fields: int = 2

    assert (Pair(1).new, Pair(1).defaults, Kept(1).set, Kept(1).fields) == (1, 2, 1, 2)
