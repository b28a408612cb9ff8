"""Walks the fields of a message type, so that a test sees a field that was added and forgotten.

A path names fields from the outermost to a leaf, joined by dots. Lists have one element where they are set; a map, a
Duration and everything that is no message is a leaf.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_M = TypeVar("_M", bound=Message)


def leaves(kind: Descriptor | None) -> Iterator[str]:
    """The paths of all leaves under a message type."""
    for field in kind.fields if kind else ():
        if _is_leaf(field):
            yield field.name
        else:
            yield from (f"{field.name}.{path}" for path in leaves(field.message_type))


def with_leaf(message: _M, path: str) -> _M:
    """A copy of a message with a leaf that is not zero; of a list the first element is meant, which may be added."""
    changed, innermost, field = _reach(message, path)
    _set(innermost, field)
    return changed


def with_parents(message: _M, path: str) -> _M:
    """A copy of a message with all that a leaf lies in, and the leaf as it was."""
    return _reach(message, path)[0]


def _reach(message: _M, path: str) -> tuple[_M, Message, Any]:
    changed = type(message)()
    changed.CopyFrom(message)
    at: Message = changed
    *parents, name = path.split(".")
    for parent in parents:
        child = getattr(at, parent)
        if at.DESCRIPTOR.fields_by_name[parent].is_repeated:
            child = child[0] if len(child) else child.add()
        child.SetInParent()
        at = child
    return changed, at, at.DESCRIPTOR.fields_by_name[name]


def _is_leaf(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is None or kind.GetOptions().map_entry or kind.full_name.startswith("google.protobuf.")


def _set(message: Message, field: FieldDescriptor) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        held = getattr(message, field.name)
        if value.message_type is None:
            held[_scalar(key)] = _scalar(value)
        else:
            held[_scalar(key)].SetInParent()
    elif field.message_type is not None:
        getattr(message, field.name).seconds = 1
    elif field.is_repeated:
        getattr(message, field.name).append(_scalar(field))
    else:
        setattr(message, field.name, _scalar(field))


def _scalar(field: FieldDescriptor) -> object:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"\2\0\0\0"  # a column of one value
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    return "x" if field.type == FieldDescriptor.TYPE_STRING else 2  # of some fields 1 is the default
