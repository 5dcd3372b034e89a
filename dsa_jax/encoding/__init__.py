"""Chat messages to the prompt text of a model, and its answer back to a message, as DeepSeek ships them.

Source: the encoding scripts beside the checkpoints of DeepSeek-V3.2, V4 and V4.1. There is no template language: each
family has its encoder, chosen by the exact `model_type` of config.json.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dsa_jax.encoding import dsml, v4, v32
from dsa_jax.encoding.messages import END_THINK, EOS, RESERVED

__all__ = ["encode_messages", "parse_message"]

TAGS = {"deepseek_v32": v32.TAGS, "deepseek_v4": v4.V4.tags, "deepseek_v41": v4.V41.tags}


def encode_messages(
    model_type: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
    effort: str | int | None = None,
    drop_thinking: bool = True,
    release: str | None = None,
) -> str:
    """The prompt of a conversation, from <｜begin▁of▁sentence｜> to where the assistant goes on.

    It holds all special tokens: a tokenizer must not add its own. Texts go in as they are; a role token inside one is
    that token.

    messages: OpenAI form; roles system, user, assistant, tool, and developer (V3.2, V4) and latest_reminder (V4, V4.1).
        An assistant message may have reasoning_content and tool_calls, a system message response_format; in V4 and
        V4.1 any message a task, and an assistant message wo_eos=True, to be continued. V4.1 takes image blocks in user
        and tool messages: each becomes one <｜deepseek_image｜>. The pixels are the caller's; results of tools come in
        the order of the calls.
    thinking: the assistant's answer begins with reasoning.
    tools: OpenAI form; they go with the first message if it is a system message, else with an empty one before it.
    effort: how long to think, without effect where thinking is False. V3.2: None. V4: a name that `release` defines.
        V4.1: 1..100, "low" (50), "high" (75, as None) or "max" (100).
    drop_thinking: leave out reasoning before the last request. V4 and V4.1 keep it where there are tools; V3.2 never
        keeps it.
    release: V4 only, where effort is given: "preview" (efforts high, max) or "0731" (low, high, max).

    Raises ValueError: an unknown model_type, or messages, tools or an effort that the family does not have.
    """
    _tags(model_type)
    if release is not None and model_type != "deepseek_v4":
        raise ValueError(f"release {release!r}: only deepseek_v4 has releases with other encodings.")
    if model_type == "deepseek_v32":
        if effort is not None:
            raise ValueError(f"effort {effort!r}: deepseek_v32 has no effort setting. Give None.")
        return v32.encode(messages, thinking=thinking, tools=tools, drop_thinking=drop_thinking)
    if model_type == "deepseek_v4":
        layout, prefix = v4.V4, v4.v4_effort(effort, release)
    else:
        layout, prefix = v4.V41, v4.v41_effort(effort)
    return v4.encode(layout, messages, thinking=thinking, tools=tools, drop_thinking=drop_thinking, effort=prefix)


def parse_message(model_type: str, text: str, *, thinking: bool) -> dict[str, Any]:
    """The assistant message of a completion: role, content, reasoning_content, tool_calls (OpenAI form, no ids).

    text: what the model wrote after the prompt, with or without the <｜end▁of▁sentence｜> at its end.
    thinking: as the prompt was encoded; the text then begins with reasoning and </think>.

    Raises ValueError: an unknown model_type, reasoning without end, malformed tool calls, text after the end, or
    special tokens inside. Nothing is repaired.
    """
    tags = _tags(model_type)
    body, _, after = text.partition(EOS)
    if after:
        raise ValueError(f"text after {EOS}: {after[:80]!r}. Give one message.")
    reasoning = ""
    if thinking:
        reasoning, end, body = body.partition(END_THINK)
        if not end:
            raise ValueError(f"the reasoning does not end with {END_THINK}: {text[-80:]!r}. Was the answer cut off?")
    opening = "\n\n" + tags.opening(tags.calls)
    content, block, rest = body.partition(opening)
    calls = dsml.read_calls(tags, tags.opening(tags.calls) + rest) if block else []
    for name, part in (("reasoning_content", reasoning), ("content", content)):
        if inside := [token for token in RESERVED if token in part]:
            raise ValueError(f"{name} contains {', '.join(inside)}, which {model_type} writes only in its markup.")
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}


def _tags(model_type: str) -> dsml.Tags:
    if model_type not in TAGS:
        raise ValueError(f"model_type {model_type!r} has no chat encoding. Allowed: {', '.join(TAGS)}.")
    return TAGS[model_type]
