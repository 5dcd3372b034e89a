"""The prompts of DeepSeek-V4 and V4.1, one layout with few differences.

Source: encoding/encoding_dsv4.py of V4-Flash, V4-Pro and V4-Flash-0731, encoding/encoding.py of V4.1-Flash (public
copies, ports and fixtures of each).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

REMINDER = "<｜latest_reminder｜>"
SYSTEM = "<｜System｜>"
IMAGE = "<｜deepseek_image｜>"
# Auxiliary requests: a token that asks for a classification or a title in place of an answer.
TASKS = {task: f"<｜{task}｜>" for task in ("action", "query", "authority", "domain", "title", "read_url")}
V41_FIELDS = {
    "system": frozenset({"tools", "response_format", "task"}),
    "user": frozenset({"task"}),
    "assistant": frozenset({"reasoning_content", "tool_calls", "task", "wo_eos"}),
    "tool": frozenset({"tool_call_id"}),
    "latest_reminder": frozenset(),
}
V4_FIELDS = V41_FIELDS | {"developer": frozenset({"tools", "response_format", "task"})}

# The models were trained on these texts: they are part of the format, to the byte.
TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "{calls}>" \
block like the following:

{calls}>
{invoke} name="$TOOL_NAME">
{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{parameter_end}
...
{invoke_end}
{invoke} name="$TOOL_NAME2">
...
{invoke_end}
{calls_end}

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
ABSOLUTE_MAXIMUM = """Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""
BEYOND_MAXIMUM = """Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""
# The same words mean other texts in the two releases, and config.json does not name the release.
V4_EFFORTS = {
    "preview": {"high": "", "max": ABSOLUTE_MAXIMUM},
    "0731": {"low": "", "high": ABSOLUTE_MAXIMUM, "max": BEYOND_MAXIMUM},
}
V41_EFFORTS = {"low": 50, "high": 75, "max": 100}


@dataclass(frozen=True)
class Layout:
    """What differs between the two.

    fields: roles, and what a message of each may have besides its content. system: the token before a system message,
    "" for none; with it, a system message inside the conversation asks for an answer as a user message does. images:
    content may hold image blocks.
    """

    model_type: str
    tags: dsml.Tags
    fields: Mapping[str, frozenset[str]]
    system: str
    images: bool

    def asks(self, i: int, role: str) -> bool:
        return role in ("user", "developer") or (role == "system" and bool(self.system) and i > 0)


V4 = Layout(
    "deepseek_v4",
    dsml.Tags("tool_calls", "invoke", "parameter"),
    V4_FIELDS,
    system="",
    images=False,
)
V41 = Layout(
    "deepseek_v41",
    dsml.Tags(" calls", " invoke", " parameter", namespaces=True),
    V41_FIELDS,
    system=SYSTEM,
    images=True,
)


def v4_effort(effort: str | int | None, release: str | None) -> str:
    """The text before a V4 conversation. None says nothing, as both releases do by default."""
    if release is not None and release not in V4_EFFORTS:
        raise ValueError(f"release {release!r} of deepseek_v4; allowed: {', '.join(V4_EFFORTS)}.")
    if effort is None:
        return ""
    if release is None:
        raise ValueError(
            f"effort {effort!r} of deepseek_v4 depends on the release. Give release='preview' (V4-Flash and V4-Pro as "
            f"first released) or release='0731' (V4-Flash-0731, V4-Pro-0813)."
        )
    allowed = V4_EFFORTS[release]
    if effort not in allowed:
        raise ValueError(f"effort {effort!r}; release {release!r} of deepseek_v4 has {', '.join(allowed)}.")
    return allowed[effort]


def v41_effort(effort: str | int | None) -> str:
    """The text before a V4.1 conversation: a number in 1..100, or its name. None is high."""
    budget = V41_EFFORTS.get("high" if effort is None else effort) if not isinstance(effort, int) else effort
    if budget is None or isinstance(effort, bool) or not 1 <= budget <= 100:
        raise ValueError(f"effort {effort!r}; deepseek_v41 has 1..100 and {', '.join(V41_EFFORTS)}.")
    return f"Reasoning Effort: {budget} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def encode(
    layout: Layout,
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    drop_thinking: bool,
    effort: str,
) -> str:
    """The prompt text. effort: the text that a thinking conversation begins with.

    Reasoning before the last request is left out, unless drop_thinking is False or there are tools.
    """
    turns = checked(layout.model_type, messages, layout.fields)
    turns = with_tools(turns, tools, ("system", "developer"))
    turns = _merge(layout, turns)
    last = _last_request(layout, turns)
    drops = thinking and drop_thinking and not any(turn.get("tools") for turn in turns)
    if drops:  # a developer's request goes with the reasoning that answered it
        turns = [turn for i, turn in enumerate(turns) if i >= last or turn["role"] != "developer"]
        last = _last_request(layout, turns)
    effort = effort if thinking else ""
    parts = [BOS]
    if effort or turns[0]["role"] == "system":
        parts.append(layout.system + effort)
    for i, turn in enumerate(turns):
        role = turn["role"]
        before = turns[i - 1] if i > 0 else {}
        if role == "system":
            parts.append((layout.system if i > 0 else "") + _text(layout, turn) + _tools(layout, turn))
            parts.append(response_format(turn))
        elif role == "user":
            parts.append(USER + "\n\n".join(turn["parts"]))
        elif role == "developer":
            parts.append(USER + _text(layout, turn) + _tools(layout, turn) + response_format(turn))
        elif role == "latest_reminder":
            parts.append(REMINDER + _text(layout, turn))
        else:
            thinks = thinking and (i > last or not drops) and "task" not in before
            parts.append(_assistant(layout, turn, thinks))
        if i + 1 == len(turns) or turns[i + 1]["role"] in ("assistant", "latest_reminder"):
            opens = THINK if thinking and (i >= last or not drops) else END_THINK
            parts.append(_answer_header(layout, i, turn, opens, THINK if thinking else END_THINK))
    return "".join(parts)


def _last_request(layout: Layout, turns: Sequence[Mapping[str, Any]]) -> int:
    return max((i for i, turn in enumerate(turns) if layout.asks(i, turn["role"])), default=-1)


def _answer_header(layout: Layout, i: int, turn: Mapping[str, Any], opens: str, task_opens: str) -> str:
    """What stands between a message and the assistant's answer to it."""
    task = turn.get("task")
    if task is None:
        return ASSISTANT + opens if layout.asks(i, turn["role"]) else ""
    if task not in TASKS:
        raise ValueError(f"task {task!r}; allowed: {', '.join(TASKS)}.")
    return (ASSISTANT + task_opens if task == "action" else "") + TASKS[task]


def _assistant(layout: Layout, turn: Mapping[str, Any], thinks: bool) -> str:
    reasoning, calls = turn.get("reasoning_content", ""), turn.get("tool_calls")
    _no_image_token(layout, reasoning)
    text = (reasoning + END_THINK if thinks else "") + _text(layout, turn)
    text += "\n\n" + dsml.write_calls(layout.tags, calls, wrap=True) if calls else ""
    return text + ("" if turn.get("wo_eos") else EOS)


def _tools(layout: Layout, turn: Mapping[str, Any]) -> str:
    if not turn.get("tools"):
        return ""
    tags = layout.tags
    return "\n\n" + TOOLS.format(
        calls=tags.opening(tags.calls),
        calls_end=tags.closing(tags.calls),
        invoke=tags.opening(tags.invoke),
        invoke_end=tags.closing(tags.invoke),
        parameter=tags.opening(tags.parameter),
        parameter_end=tags.closing(tags.parameter),
        schemas=dsml.tool_schemas(tags, turn["tools"]),
    )


def _merge(layout: Layout, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """User messages and tool results that follow each other as one user message with `parts`.

    Results of one assistant message come in the order of its calls, whatever order they arrived in; an unknown call
    counts as the first.
    """
    turns: list[dict[str, Any]] = []
    order: dict[str, int] = {}
    results: list[tuple[int, int, str]] = []  # of the open user message: rank, index in parts, text
    for message in messages:
        role = message["role"]
        if role not in ("user", "tool"):
            results = []
            if message.get("tool_calls"):
                order = {call["id"]: k for k, call in enumerate(message["tool_calls"]) if call.get("id")}
            turns.append(message)
            continue
        joins = bool(turns) and turns[-1]["role"] == "user" and (role == "tool" or "task" not in turns[-1])
        if not joins:
            results = []
            turns.append({"role": "user", "parts": []} | ({"task": message["task"]} if "task" in message else {}))
        elif "task" in message:
            raise ValueError(f"task {message['task']!r} is on a user message that joins the one before. Put it there.")
        parts = turns[-1]["parts"]
        if role == "user":
            parts += _blocks(layout, message)
            continue
        text = f"<tool_result>{_text(layout, message)}</tool_result>"
        results.append((order.get(message.get("tool_call_id", ""), 0), len(parts), text))
        parts.append(text)
        if len(results) > 1:
            for (_, index, _), (_, _, result) in zip(results, sorted(results, key=lambda item: item[0]), strict=True):
                parts[index] = result
    return turns


def _text(layout: Layout, message: Mapping[str, Any]) -> str:
    return "\n\n".join(_blocks(layout, message))


def _blocks(layout: Layout, message: Mapping[str, Any]) -> list[str]:
    """The content of a message as texts: itself, or one per block."""
    content = message.get("content", "")
    if not isinstance(content, list):
        text = plain_text(message)
        _no_image_token(layout, text)
        return [text]
    return [_block(layout, message["role"], block) for block in content]


def _block(layout: Layout, role: str, block: Any) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    if kind == "text":
        text = block.get("text") or ""
        _no_image_token(layout, text)
        return text
    if layout.images and kind in ("image", "image_url") and role in ("user", "tool"):
        return IMAGE
    allowed = "text, image, image_url" if layout.images and role in ("user", "tool") else "text"
    raise ValueError(f"a {role} message holds a content block of type {kind!r}; {layout.model_type} takes {allowed}.")


def _no_image_token(layout: Layout, text: str) -> None:
    if layout.images and IMAGE in text:
        raise ValueError(f"text contains {IMAGE!r}, which stands for an image: {text[:80]!r}. Give an image block.")
