"""What the encoders of all families share: special tokens, and the messages that they take."""

from collections.abc import Mapping, Sequence
from typing import Any

from dsa_jax.encoding.dsml import DSML, to_json

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"

# Never part of what an assistant says.
RESERVED = (BOS, EOS, THINK, END_THINK, DSML)

# `mask` leaves a message out of the training loss; it does not change the text.
FIELDS = frozenset({"role", "content", "mask"})

RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


def checked(
    model_type: str, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, frozenset[str]]
) -> list[dict[str, Any]]:
    """Copies of the messages, without fields that are None. ValueError: a role or field that this family has not.

    fields: the family's roles, and what a message of each may have besides FIELDS.
    """
    if not messages:
        raise ValueError("there are no messages. A conversation has at least one.")
    copies = []
    for i, message in enumerate(messages):
        copy = {key: value for key, value in message.items() if value is not None}
        role = copy.get("role")
        if role not in fields:
            raise ValueError(f"messages[{i}]: role {role!r}; {model_type} has {', '.join(fields)}.")
        allowed = FIELDS | fields[role]
        if unknown := sorted(copy.keys() - allowed):
            raise ValueError(
                f"messages[{i}] ({role}): fields {', '.join(unknown)} do not reach the prompt of {model_type}. "
                f"Allowed: {', '.join(sorted(allowed))}."
            )
        if not isinstance(reasoning := copy.get("reasoning_content", ""), str):
            kind = type(reasoning).__name__
            raise ValueError(f"messages[{i}]: reasoning_content is {kind}, not text: {reasoning!r}.")
        copies.append(copy)
    return copies


def with_tools(
    messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, holders: Sequence[str]
) -> list[dict[str, Any]]:
    """The messages with `tools` on the first one, which has one of the roles `holders`; else an empty system one."""
    if not tools:
        return messages
    if any(message.get("tools") for message in messages):
        raise ValueError("tools are given as an argument and on a message. Give them once.")
    first, *rest = messages
    if first["role"] not in holders:
        first, rest = {"role": "system", "content": ""}, messages
    return [first | {"tools": list(tools)}, *rest]


def plain_text(message: Mapping[str, Any]) -> str:
    """The content of a message, which has to be text."""
    content = message.get("content", "")
    if not isinstance(content, str):
        raise ValueError(f"content of a {message['role']} message is {type(content).__name__}, not text: {content!r}.")
    return content


def response_format(message: Mapping[str, Any]) -> str:
    """The schema that the reply has to follow, or nothing."""
    schema = message.get("response_format")
    return "\n\n" + RESPONSE_FORMAT + to_json(schema) if schema else ""
