"""The prompt of DeepSeek-V3.2. Source: encoding/encoding_dsv32.py of the checkpoint (public copies and fixtures)."""

from collections.abc import Mapping, Sequence
from typing import Any

from dsa_jax.encoding import dsml
from dsa_jax.encoding.messages import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    THINK,
    USER,
    checked,
    plain_text,
    response_format,
    with_tools,
)

TAGS = dsml.Tags("function_calls", "invoke", "parameter")
FIELDS = {
    "system": frozenset({"tools", "response_format"}),
    "user": frozenset(),
    "developer": frozenset({"tools", "response_format"}),
    "assistant": frozenset({"reasoning_content", "tool_calls"}),
    "tool": frozenset({"tool_call_id"}),
}

# The model was trained on this text: it is part of the format, to the byte.
TOOLS = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to \
the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
%s
</functions>
"""


def encode(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    drop_thinking: bool,
) -> str:
    """The prompt text. Reasoning is part of it only after the last user message."""
    turns = with_tools(checked("deepseek_v32", messages, FIELDS), tools, ("system", "developer"))
    last = _last_user(turns)
    if thinking and drop_thinking:  # a developer's request goes with the reasoning that answered it
        turns = [turn for i, turn in enumerate(turns) if i >= last or turn["role"] != "developer"]
        last = _last_user(turns)
    parts = [BOS]
    for i, turn in enumerate(turns):
        role, thinks = turn["role"], thinking and i >= last
        if role == "system":
            parts.append(plain_text(turn) + _tools(turn) + response_format(turn))
        elif role == "user":
            parts.append(_request(plain_text(turn), thinks))
        elif role == "developer":
            text = f"\n\n# The user's message is: {plain_text(turn)}"
            parts.append(_request(_tools(turn) + response_format(turn) + text, thinks))
        elif role == "assistant":
            parts.append(_assistant(i, turn, thinks))
        else:
            parts.append(_tool_result(i, turns, thinks))
    return "".join(parts)


def _last_user(turns: Sequence[Mapping[str, Any]]) -> int:
    return max((i for i, turn in enumerate(turns) if turn["role"] in ("user", "developer")), default=-1)


def _tools(turn: Mapping[str, Any]) -> str:
    tools = turn.get("tools")
    return "\n\n" + TOOLS % dsml.tool_schemas(TAGS, tools) if tools else ""


def _request(text: str, thinks: bool) -> str:
    return USER + text + ASSISTANT + (THINK if thinks else END_THINK)


def _assistant(i: int, turn: Mapping[str, Any], thinks: bool) -> str:
    calls, reasoning = turn.get("tool_calls"), turn.get("reasoning_content", "")
    if thinks and not (reasoning or calls):
        raise ValueError(
            f"messages[{i}]: after the last user message a thinking deepseek_v32 has reasoning_content or tool_calls, "
            f"and this answer has neither. Give its reasoning_content, or encode with thinking=False."
        )
    text = (reasoning + END_THINK if thinks else "") + plain_text(turn)
    return text + ("\n\n" + dsml.write_calls(TAGS, calls, wrap=False) if calls else "") + EOS


def _tool_result(i: int, turns: Sequence[Mapping[str, Any]], thinks: bool) -> str:
    """One result. The first opens the block, the last closes it and lets the assistant go on."""
    caller = i - 1
    while caller >= 0 and turns[caller]["role"] == "tool":
        caller -= 1
    calls = turns[caller].get("tool_calls", ()) if caller >= 0 else ()
    number = i - caller
    is_last = i + 1 == len(turns) or turns[i + 1]["role"] != "tool"
    if number > len(calls) or (is_last and number < len(calls)):
        raise ValueError(
            f"messages[{i}]: tool result {number} of an assistant message with {len(calls)} tool calls. "
            f"deepseek_v32 takes one result per call, in the order of the calls."
        )
    text = f"\n<result>{plain_text(turns[i])}</result>"
    if number == 1:
        text = "\n\n<function_results>" + text
    if is_last:
        text += "\n</function_results>\n\n" + (THINK if thinks else END_THINK)
    return text
