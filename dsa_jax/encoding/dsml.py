"""Tool calls in DSML, the markup that DeepSeek's models write them in: one grammar, tag names per family.

Source: encoding scripts of DeepSeek-V3.2, V4 and V4.1. The markup does not escape its contents.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DSML = "｜DSML｜"


@dataclass(frozen=True)
class Tags:
    """Tag names of one family.

    calls: the block around all calls. invoke: one call. parameter: one argument. The leading spaces of V4.1 belong to
    its names. namespaces: a tool has a name of the form namespace::name, and calls carry the namespace apart.
    """

    calls: str
    invoke: str
    parameter: str
    namespaces: bool = False

    def opening(self, tag: str) -> str:
        return f"<{DSML}{tag}"

    def closing(self, tag: str) -> str:
        return f"</{DSML}{tag}>"


def to_json(value: Any) -> str:
    """JSON as the models saw it: one line, ", " and ": " between items, characters outside ASCII as they are."""
    return json.dumps(value, ensure_ascii=False)


def tool_schemas(tags: Tags, tools: Sequence[Mapping[str, Any]]) -> str:
    """One line of JSON per tool, from the OpenAI form {"type": "function", "function": {...}}."""
    return "\n".join(to_json(_schema(tags, tool)) for tool in tools)


def _schema(tags: Tags, tool: Mapping[str, Any]) -> dict[str, Any]:
    function = _function(tool, "tool")
    if not tags.namespaces:
        return dict(function)
    namespace = _namespace(tool, function)
    schema = {key: value for key, value in function.items() if key != "namespace"}
    schema["name"] = _qualified(*_split_name(function["name"], _namespace_name(namespace)))
    if isinstance(namespace, Mapping) and namespace.get("description"):
        schema["description"] = f"{namespace['description']}\n{function.get('description') or ''}"
    return schema


def write_calls(tags: Tags, calls: Sequence[Mapping[str, Any]], *, wrap: bool) -> str:
    """The block of tool calls that ends an assistant message, without the blank line before it.

    calls: OpenAI form, {"function": {"name": ..., "arguments": JSON text of an object, or the object}}.
    wrap: arguments that are no object become the one parameter "arguments"; otherwise they are a ValueError.
    """
    lines = [tags.opening(tags.calls) + ">"]
    for call in calls:
        function = _function(call, "tool call")
        name = function["name"]
        if tags.namespaces:
            name = _qualified(*_split_name(name, _namespace_name(_namespace(call, function))))
        if "arguments" not in function:
            raise ValueError(f"the call of tool {name!r} has no arguments. Give a JSON object; '{{}}' for none.")
        lines += [
            f'{tags.opening(tags.invoke)} name="{name}">',
            "\n".join(_parameters(tags, name, function["arguments"], wrap)),
            tags.closing(tags.invoke),
        ]
    return "\n".join([*lines, tags.closing(tags.calls)])


def _parameters(tags: Tags, name: str, arguments: Any, wrap: bool) -> Iterator[str]:
    value = arguments
    for _ in range(2):  # clients send JSON text of JSON text, too
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                break
    if not isinstance(value, Mapping):
        if not wrap:
            raise ValueError(f"arguments of tool {name!r} are {arguments!r}. Give a JSON object, or its JSON text.")
        value = {"arguments": arguments}
    for key, item in value.items():
        text, is_string = (item, "true") if isinstance(item, str) else (to_json(item), "false")
        yield f'{tags.opening(tags.parameter)} name="{key}" string="{is_string}">{text}{tags.closing(tags.parameter)}'


def read_calls(tags: Tags, block: str) -> list[dict[str, Any]]:
    """The calls of one block as `write_calls` writes it, in OpenAI form with `arguments` as JSON text.

    Raises ValueError where the block departs from the grammar: it is not repaired.
    """
    start, end = tags.opening(tags.calls) + ">\n", tags.closing(tags.calls)
    invoke = re.compile(re.escape(tags.opening(tags.invoke)) + r' name="(.*?)">\n', re.DOTALL)
    parameter = re.compile(
        re.escape(tags.opening(tags.parameter))
        + r' name="(.*?)" string="(true|false)">(.*?)'
        + re.escape(tags.closing(tags.parameter))
        + r"\n",
        re.DOTALL,
    )
    invoke_end = re.compile(r"\n?" + re.escape(tags.closing(tags.invoke)) + r"\n")  # no parameter: an empty line
    calls = []
    if not block.startswith(start):
        raise _malformed(block, 0, start)
    position = len(start)
    while not block.startswith(end, position):
        opened = invoke.match(block, position)
        if opened is None:
            raise _malformed(block, position, f"{tags.opening(tags.invoke)} name=...> or {end}")
        position = opened.end()
        arguments: dict[str, str] = {}
        while found := parameter.match(block, position):
            key, is_string, text = found.groups()
            if key in arguments:
                raise ValueError(f"tool call of {opened[1]!r}: parameter {key!r} is given twice.")
            arguments[key] = to_json(text) if is_string == "true" else _checked_json(opened[1], key, text)
            position = found.end()
        closed = invoke_end.match(block, position)
        if closed is None:
            expected = f"{tags.opening(tags.parameter)} name=... string=...> or {tags.closing(tags.invoke)}"
            raise _malformed(block, position, expected)
        position = closed.end()
        calls.append(_call(tags, opened[1], arguments))
    if block[position:] != end:
        raise _malformed(block, position + len(end), "the end of the message")
    return calls


def _call(tags: Tags, name: str, arguments: dict[str, str]) -> dict[str, Any]:
    namespace, name = _split_name(name, None) if tags.namespaces else (None, name)
    text = "{" + ", ".join(f"{to_json(key)}: {value}" for key, value in arguments.items()) + "}"
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": text}}
    return call if namespace is None else call | {"namespace": namespace}


def _checked_json(tool: str, key: str, text: str) -> str:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        message = f'tool call of {tool!r}: parameter {key!r} says string="false" and is no JSON: {error}'
        raise ValueError(message) from None
    return text


def _malformed(block: str, position: int, expected: str) -> ValueError:
    return ValueError(f"malformed tool calls at {block[position : position + 80]!r}: expected {expected}.")


def _function(entry: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    function = entry.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f'a {kind} is {{"type": "function", "function": {{"name": ...}}}}; given: {dict(entry)!r}.')
    return function


def _namespace(entry: Mapping[str, Any], function: Mapping[str, Any]) -> Any:
    """The namespace beside the function, else the one in it: a name, or {"name": ..., "description": ...}."""
    given = entry.get("namespace")
    return function.get("namespace") if given is None else given


def _namespace_name(namespace: Any) -> str | None:
    name = namespace.get("name", namespace) if isinstance(namespace, Mapping) else namespace
    if not isinstance(name, str | None):
        raise ValueError(f'a tool\'s namespace is a name or {{"name": ..., "description": ...}}; given: {namespace!r}.')
    return name


def _split_name(name: str, namespace: str | None) -> tuple[str | None, str]:
    prefix, separator, bare = name.partition("::")
    if separator:
        if namespace not in (None, prefix):
            raise ValueError(f"tool {name!r} is in namespace {prefix!r} by its name and in {namespace!r} by its field.")
        namespace, name = prefix, bare
    if "::" in name or "::" in (namespace or ""):
        raise ValueError(f"tool {name!r} in namespace {namespace!r}: neither may contain '::'.")
    return namespace, name


def _qualified(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}::{name}"
