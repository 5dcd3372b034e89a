"""Chat encoding: prompts equal to public output of DeepSeek's own encoders, and messages back out of completions.

No expected text here comes from our encoder. golden/encoding/*_tools.txt, each with a newline added at its end:
  v32_tools.txt  ai-dynamo/dynamo, lib/llm/tests/data/deepseek-v3.2/test_output.txt (DeepSeek-V3.2, encoding/)
  v4_tools.txt   vllm-project/vllm, tests/tokenizers_/fixtures/deepseek_v4/test_output_1.txt (DeepSeek-V4-Flash,
                 encoding/tests/test_output_1.txt)
  v41_tools.txt  vllm-project/vllm, tests/tokenizers_/fixtures/deepseek_v41/test_output_1.txt (the V4.1 encoder's)
Sources of the other cases stand above them.
"""

import copy
import json
import re
import shutil

import pytest
from conftest import GOLDEN
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from dsa_jax.cli import _encode_chat
from dsa_jax.encoding import encode_messages, parse_message

BOS, EOS, USER, ASSISTANT, SYSTEM = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜System｜>",
)


def golden(name):
    return (GOLDEN / "encoding" / name).read_text(encoding="utf-8").removesuffix("\n")


def effort_line(budget):
    # DeepSeek-V4.1-Flash, encoding/test_encoding.py
    return f"Reasoning Effort: {budget} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def system(content, **fields):
    return {"role": "system", "content": content} | fields


def user(content, **fields):
    return {"role": "user", "content": content} | fields


def assistant(content, reasoning=None, calls=None, **fields):
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning} | fields
    return message if calls is None else message | {"tool_calls": [call(*item) for item in calls]}


def call(id, name, arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, id=None):
    return {"role": "tool", "content": content, "tool_call_id": id}


def tool(name, description, properties, required):
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


# ---------------------------------------------------------------- tools, results, several turns

BEIJING_TOOLS = [
    tool(
        "get_weather",
        "Get the weather for a specific location",
        {
            "location": {"type": "string", "description": "The city name"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Temperature unit"},
        },
        ["location"],
    ),
    tool(
        "search",
        "Search the web for information",
        {
            "query": {"type": "string", "description": "Search query"},
            "num_results": {"type": "integer", "description": "Number of results to return"},
        },
        ["query"],
    ),
]
BEIJING = [
    system("You are a helpful assistant."),
    user("What's the weather in Beijing?"),
    assistant(
        None,
        "The user wants to know the weather in Beijing. I should use the get_weather tool.",
        [("call_001", "get_weather", '{"location": "Beijing", "unit": "celsius"}')],
    ),
    result('{"temperature": 22, "condition": "sunny", "humidity": 45}', "call_001"),
    assistant(
        "The weather in Beijing is currently sunny with a temperature of 22°C and 45% humidity.",
        "Got the weather data. Let me format a nice response.",
    ),
]

CITIES_TOOLS = [
    tool(
        "get_datetime",
        "Get the current date and time",
        {"timezone": {"type": "string", "description": "The timezone, e.g. America/New_York, UTC"}},
        ["timezone"],
    ),
    tool(
        "get_weather",
        "Get the weather for a specific date and location",
        {
            "location": {"type": "string", "description": "The city name, e.g. New York, San Francisco"},
            "date": {"type": "string", "description": "The date in YYYY-MM-DD format"},
        },
        ["location", "date"],
    ),
]


def weather(location, date, high, low, weather, humidity):
    names = ("location", "date", "temperature_high", "temperature_low", "weather", "humidity")
    return result(json.dumps(dict(zip(names, (location, date, high, low, weather, humidity), strict=True))))


def both_cities(date):
    places = ("San Francisco", "New York")
    return [(None, "get_weather", json.dumps({"location": place, "date": date})) for place in places]


CITIES = [
    system("You are a helpful Assistant."),
    user("What's the weather tomorrow in San Francisco and New York?"),
    assistant(
        None,
        "User is asking about tomorrow's weather. I need to first get the current date to calculate tomorrow's date.",
        [(None, "get_datetime", '{"timezone": "America/New_York"}')],
    ),
    result('{"current_date": "2024-01-15", "current_time": "14:30:00", "timezone": "America/New_York"}'),
    assistant(
        None,
        "Now I know today is 2024-01-15, so tomorrow is 2024-01-16. Let me query the weather for San Francisco and "
        "New York.",
        both_cities("2024-01-16"),
    ),
    weather("San Francisco", "2024-01-16", "65", "55", "partly cloudy", "70%"),
    weather("New York", "2024-01-16", "28", "15", "sunny", "35%"),
    assistant(
        "Based on the forecast, here's tomorrow's weather (January 16, 2024):\n\n**San Francisco**:\n"
        "- Weather: Partly cloudy\n- High: 65°F\n- Low: 55°F\n- Humidity: 70%\n\n**New York**:\n- Weather: Sunny\n"
        "- High: 28°F\n- Low: 15°F\n- Humidity: 35%\n\nSan Francisco will be mild and partly cloudy, while New York "
        "will be cold but sunny. If you're in New York, dress warmly!",
        "Retrieved weather data for both cities. Now I'll format a nice response for the user.",
    ),
    user("Thanks! What about the day after tomorrow?"),
    assistant(
        None,
        "User is now asking about the day after tomorrow, which is 2024-01-17. I can query directly since I already "
        "know today's date.",
        both_cities("2024-01-17"),
    ),
    weather("San Francisco", "2024-01-17", "68", "58", "light rain", "85%"),
    weather("New York", "2024-01-17", "32", "22", "cloudy", "50%"),
    assistant(
        "Here's the forecast for the day after tomorrow (January 17, 2024):\n\n**San Francisco**:\n"
        "- Weather: Light rain\n- High: 68°F\n- Low: 58°F\n- Humidity: 85%\n\n**New York**:\n- Weather: Cloudy\n"
        "- High: 32°F\n- Low: 22°F\n- Humidity: 50%\n\nSan Francisco will have light rain with temperatures rising "
        "slightly, so bring an umbrella. New York will be a bit warmer but still cold and cloudy, so continue to "
        "bundle up.",
        "Got the weather data for the day after tomorrow. Let me format this for the user.",
    ),
]

TOOL_CASES = {
    "deepseek_v32": (CITIES, CITIES_TOOLS, "v32_tools.txt"),
    "deepseek_v4": (BEIJING, BEIJING_TOOLS, "v4_tools.txt"),
    "deepseek_v41": (BEIJING, BEIJING_TOOLS, "v41_tools.txt"),
}


@pytest.mark.parametrize("model_type", TOOL_CASES)
def test_ac_66_tools_thinking_and_results(model_type):
    messages, tools, name = TOOL_CASES[model_type]
    before = copy.deepcopy((messages, tools))
    assert encode_messages(model_type, messages, thinking=True, tools=tools) == golden(name)
    assert (messages, tools) == before


@pytest.mark.parametrize("model_type", TOOL_CASES)
def test_tools_on_the_first_message_are_the_same_prompt(model_type):
    messages, tools, name = TOOL_CASES[model_type]
    messages = [messages[0] | {"tools": tools}, *messages[1:]]
    assert encode_messages(model_type, messages, thinking=True) == golden(name)
    with pytest.raises(ValueError, match="as an argument and on a message"):
        encode_messages(model_type, messages, thinking=True, tools=tools)


# ---------------------------------------------------------------- V4.1

# hw-native-sys/pypto-serving, tests/fixtures/deepseek_v41/chat_encoding_golden.json: output of encoding/encoding.py of
# DeepSeek-V4.1-Flash, revision dba1be0a (SHA-256 502bdaec...).
TWO, FOUR = user("What is 2+2?"), assistant("4", "Add two and two.")
TURN = f"{USER}What is 2+2?{ASSISTANT}"
V41_PINNED = {
    "basic": ([TWO], {}, f"{TURN}</think>"),
    "first_system": ([system("Be concise."), TWO], {}, f"{SYSTEM}Be concise.{TURN}</think>"),
    "multi_turn": (
        [TWO, FOUR, user("And +1?")],
        {},
        f"{TURN}</think>4{EOS}{USER}And +1?{ASSISTANT}</think>",
    ),
    "mid_system": (
        [TWO, FOUR, system("Now use French.")],
        {},
        f"{TURN}</think>4{EOS}{SYSTEM}Now use French.{ASSISTANT}</think>",
    ),
    "mid_system_answer": (
        [TWO, FOUR, system("Now use French."), assistant("D accord.")],
        {},
        f"{TURN}</think>4{EOS}{SYSTEM}Now use French.{ASSISTANT}</think>D accord.{EOS}",
    ),
    "thinking_default": ([TWO], {"thinking": True}, f"{SYSTEM}{effort_line(75)}{TURN}<think>"),
    "thinking_system_low": (
        [system("Be concise."), TWO],
        {"thinking": True, "effort": "low"},
        f"{SYSTEM}{effort_line(50)}Be concise.{TURN}<think>",
    ),
    "thinking_numeric": ([TWO], {"thinking": True, "effort": 64}, f"{SYSTEM}{effort_line(64)}{TURN}<think>"),
    "thinking_max": ([TWO], {"thinking": True, "effort": "max"}, f"{SYSTEM}{effort_line(100)}{TURN}<think>"),
    "thinking_drop_old": (
        [TWO, FOUR, user("Why?")],
        {"thinking": True},
        f"{SYSTEM}{effort_line(75)}{TURN}</think>4{EOS}{USER}Why?{ASSISTANT}<think>",
    ),
    "thinking_retain_old": (
        [TWO, FOUR, user("Why?")],
        {"thinking": True, "drop_thinking": False},
        f"{SYSTEM}{effort_line(75)}{TURN}<think>Add two and two.</think>4{EOS}{USER}Why?{ASSISTANT}<think>",
    ),
    "thinking_final_answer": (
        [TWO, FOUR],
        {"thinking": True},
        f"{SYSTEM}{effort_line(75)}{TURN}<think>Add two and two.</think>4{EOS}",
    ),
    "reminder": (
        [TWO, {"role": "latest_reminder", "content": "Today is Friday."}],
        {},
        f"{TURN}</think><｜latest_reminder｜>Today is Friday.",
    ),
    "without_eos": ([TWO, FOUR | {"wo_eos": True}], {}, f"{TURN}</think>4"),
    "system_only": ([system("Be concise.")], {}, f"{SYSTEM}Be concise."),
    "multiple_systems": (
        [system("Be concise."), system("Also be precise."), TWO],
        {},
        f"{SYSTEM}Be concise.{SYSTEM}Also be precise.{TURN}</think>",
    ),
    "adjacent_users": ([user("A"), user("B")], {}, f"{USER}A\n\nB{ASSISTANT}</think>"),
    "adjacent_users_thinking": (
        [user("A"), user(""), user("B")],
        {"thinking": True},
        f"{SYSTEM}{effort_line(75)}{USER}A\n\n\n\nB{ASSISTANT}<think>",
    ),
}


@pytest.mark.parametrize("name", V41_PINNED)
def test_ac_66_v41_plain_thinking_and_effort(name):
    messages, options, expected = V41_PINNED[name]
    assert encode_messages("deepseek_v41", messages, **({"thinking": False} | options)) == BOS + expected


# DeepSeek-V4.1-Flash, encoding/test_encoding.py (read from Lebhoryi/deepseek_v41_flash_learning, encoding/).
@pytest.mark.parametrize(
    ("effort", "budget"), [(None, 75), ("low", 50), ("high", 75), ("max", 100), (1, 1), (42, 42), (100, 100)]
)
def test_v41_effort_is_a_budget(effort, budget):
    prompt = encode_messages("deepseek_v41", [user("question")], thinking=True, effort=effort)
    assert prompt == f"{BOS}{SYSTEM}{effort_line(budget)}{USER}question{ASSISTANT}<think>"
    plain = encode_messages("deepseek_v41", [user("question")], thinking=False, effort=effort)
    assert plain == f"{BOS}{USER}question{ASSISTANT}</think>"


@pytest.mark.parametrize("effort", [-1, 0, 101, True, "medium", "xhigh"])
def test_v41_refuses_other_efforts(effort):
    with pytest.raises(ValueError, match=r"1\.\.100 and low, high, max"):
        encode_messages("deepseek_v41", [user("question")], thinking=True, effort=effort)


# Same source: images, system messages inside a conversation, tasks.
def test_v41_images_and_tasks():
    picture = {"type": "image_url", "image_url": {"url": "/unused/image.png"}}
    prompt = encode_messages("deepseek_v41", [user([{"type": "text", "text": "inspect"}, picture])], thinking=False)
    assert prompt == f"{BOS}{USER}inspect\n\n<｜deepseek_image｜>{ASSISTANT}</think>"
    with pytest.raises(ValueError, match="stands for an image"):
        encode_messages("deepseek_v41", [user("hi <｜deepseek_image｜>")], thinking=False)
    prompt = encode_messages("deepseek_v41", [user("classify me", task="query")], thinking=False)
    assert prompt.endswith("classify me<｜query｜>")
    assert ASSISTANT not in prompt


def test_v41_system_message_inside_a_conversation_ends_the_turn():
    messages = [system("sys"), user("q1"), assistant("a1", "r1"), system("mid sys")]
    assert encode_messages("deepseek_v41", messages, thinking=True, effort=88) == (
        f"{BOS}{SYSTEM}{effort_line(88)}sys{USER}q1{ASSISTANT}</think>a1{EOS}{SYSTEM}mid sys{ASSISTANT}<think>"
    )


# smg-project/smg, crates/tokenizer/tests/fixtures/deepseek_v41/render_fixtures.json: output of encoding/encoding.py of
# DeepSeek-V4.1-Flash, revision 517ef625. Budgets are given as numbers, since that revision named them otherwise.
LOOKUP = [tool("lookup", "Look up", {"query": {"type": "string"}}, ["query"])]
LOOKUPS = assistant(
    "summary", "reason", [("call_a", "lookup", '{"query": "first"}'), ("call_b", "lookup", '{"query": "second"}')]
)
LOOKUPS_TEXT = (
    f"{USER}question{ASSISTANT}<think>reason</think>summary\n\n"
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="lookup">\n'
    '<｜DSML｜ parameter name="query" string="true">first</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    '<｜DSML｜ invoke name="lookup">\n'
    '<｜DSML｜ parameter name="query" string="true">second</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    f"</｜DSML｜ calls>{EOS}{USER}"
)
F = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
F_TAIL = f"\n</｜DSML｜ invoke>\n</｜DSML｜ calls>{EOS}{USER}<tool_result>done</tool_result>{ASSISTANT}<think>"
F_HEAD = f'{USER}q{ASSISTANT}<think></think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'


def f_called_with(arguments):
    return [user("q"), assistant("", None, [("c1", "f", arguments)]), result("done", "c1")]


V41_TOOL_TAILS = {
    "tool_results_sorted": (
        [user("question"), LOOKUPS, result("second result", "call_b"), result("first result", "call_a")],
        LOOKUP,
        LOOKUPS_TEXT
        + "<tool_result>first result</tool_result>\n\n<tool_result>second result</tool_result>"
        + f"{ASSISTANT}<think>",
    ),
    "tool_results_unknown_id": (
        [
            user("question"),
            LOOKUPS,
            result("second result", "call_b"),
            result("unknown result", "call_x"),
            result("first result", "call_a"),
        ],
        LOOKUP,
        LOOKUPS_TEXT
        + "<tool_result>unknown result</tool_result>\n\n<tool_result>first result</tool_result>\n\n"
        + f"<tool_result>second result</tool_result>{ASSISTANT}<think>",
    ),
    "values_of_all_kinds": (
        f_called_with('{"n": 3, "ok": true, "obj": {"temp": "C"}, "s": "raw <x>"}'),
        F,
        F_HEAD
        + '<｜DSML｜ parameter name="n" string="false">3</｜DSML｜ parameter>\n'
        + '<｜DSML｜ parameter name="ok" string="false">true</｜DSML｜ parameter>\n'
        + '<｜DSML｜ parameter name="obj" string="false">{"temp": "C"}</｜DSML｜ parameter>\n'
        + '<｜DSML｜ parameter name="s" string="true">raw <x></｜DSML｜ parameter>'
        + F_TAIL,
    ),
    "array_for_an_object": (
        f_called_with("[1, 2]"),
        F,
        F_HEAD + '<｜DSML｜ parameter name="arguments" string="true">[1, 2]</｜DSML｜ parameter>' + F_TAIL,
    ),
    "json_text_of_json_text": (
        f_called_with('"{\\"a\\": 1}"'),
        F,
        F_HEAD + '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>' + F_TAIL,
    ),
}


@pytest.mark.parametrize("name", V41_TOOL_TAILS)
def test_ac_66_v41_tool_calls_and_results(name):
    messages, tools, tail = V41_TOOL_TAILS[name]
    prompt = encode_messages("deepseek_v41", messages, thinking=True, tools=tools, effort=50)
    head = f"{BOS}{SYSTEM}{effort_line(50)}\n\n## Tools\n\n"
    schemas = "\n".join(json.dumps(entry["function"]) for entry in tools)
    end = "You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
    assert prompt.startswith(head)
    assert prompt.endswith(f"### Available Tool Schemas\n\n{schemas}\n\n{end}{tail}")
    # between the two stands the text that the whole golden prompt pins
    instructions = golden("v41_tools.txt").partition("## Tools")[2].partition("### Available")[0]
    assert prompt.partition("## Tools")[2].partition("### Available")[0] == instructions


V41_RENDERED = {
    "response_format": (
        [
            system(
                "Answer in JSON.",
                response_format={
                    "type": "object",
                    "properties": {"answer": {"type": "string"}},
                    "required": ["answer"],
                },
            ),
            user("q"),
        ],
        {"thinking": True, "effort": 50},
        f"{SYSTEM}{effort_line(50)}Answer in JSON.\n\n## Response Format:\n\nYou MUST strictly adhere to the following "
        'schema to reply:\n{"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}'
        f"{USER}q{ASSISTANT}<think>",
    ),
    "continue_final_message": (
        [user("q"), assistant("Sure,", "r", wo_eos=True)],
        {"thinking": True, "effort": 50},
        f"{SYSTEM}{effort_line(50)}{USER}q{ASSISTANT}<think>r</think>Sure,",
    ),
    "action": (  # its encoding/tests/test_input_4.json
        [
            system("该助手为DeepSeek-V3，由深度求索公司创造。\n今天是2025年10月17日，星期五。"),
            {"role": "latest_reminder", "content": "2024-11-15,上海市,App,中文"},
            user("热海大滚锅是世界著名温泉吗"),
            assistant("是独特的地质现象和旅游景点。", mask=1),
            user("世界著名温泉有哪些", task="action"),
            assistant("Search"),
        ],
        {"thinking": False},
        f"{SYSTEM}该助手为DeepSeek-V3，由深度求索公司创造。\n今天是2025年10月17日，星期五。"
        f"<｜latest_reminder｜>2024-11-15,上海市,App,中文{USER}热海大滚锅是世界著名温泉吗{ASSISTANT}</think>"
        f"是独特的地质现象和旅游景点。{EOS}{USER}世界著名温泉有哪些{ASSISTANT}</think><｜action｜>Search{EOS}",
    ),
    "empty_text_and_image": (
        [
            user(
                [
                    {"type": "text", "text": ""},
                    {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
                    {"type": "text", "text": "describe"},
                ]
            )
        ],
        {"thinking": False},
        f"{USER}\n\n<｜deepseek_image｜>\n\ndescribe{ASSISTANT}</think>",
    ),
}


@pytest.mark.parametrize("name", V41_RENDERED)
def test_v41_other_messages(name):
    messages, options, expected = V41_RENDERED[name]
    assert encode_messages("deepseek_v41", messages, **options) == BOS + expected


# The same repository's render_ids_fixtures.json holds what the checkpoint's tokenizer.json (SHA-256 c90dfa01...) makes
# of these prompts. One special token in the text is one id; the rest is the tokenizer's affair.
SPECIAL_IDS = {
    "<｜begin▁of▁sentence｜>": 0,
    "<｜end▁of▁sentence｜>": 1,
    "<｜System｜>": 128799,
    "<｜User｜>": 128803,
    "<｜Assistant｜>": 128804,
    "<think>": 128821,
    "</think>": 128822,
    "｜DSML｜": 128825,
    "<｜latest_reminder｜>": 128828,
    "<｜action｜>": 128829,
    "<｜deepseek_image｜>": 129264,
}


def special_ids(text):
    found = [(position, SPECIAL_IDS[token]) for token in SPECIAL_IDS for position in occurrences(text, token)]
    return [token_id for _, token_id in sorted(found)]


def occurrences(text, token):
    position = text.find(token)
    while position >= 0:
        yield position
        position = text.find(token, position + 1)


def test_ac_66_special_token_ids_are_the_recorded_ones():
    messages = [user("q1"), assistant("a1", "r1"), user("q2")]
    kept = encode_messages("deepseek_v41", messages, thinking=True, effort=50, drop_thinking=False)
    assert special_ids(kept) == [0, 128799, 128803, 128804, 128821, 128822, 1, 128803, 128804, 128821]
    dropped = encode_messages("deepseek_v41", messages, thinking=True, effort=50)
    assert special_ids(dropped) == [0, 128799, 128803, 128804, 128822, 1, 128803, 128804, 128821]
    messages, options, _ = V41_RENDERED["action"]
    assert special_ids(encode_messages("deepseek_v41", messages, **options)) == (
        [0, 128799, 128828, 128803, 128804, 128822, 1, 128803, 128804, 128822, 128829, 1]
    )


# V4's tokenizer has the same ids for these (public checks of DeepSeek-V4-Flash's tokenizer.json list the last five).
def test_ac_66_special_token_ids_of_v4():
    messages = [user("q1"), assistant("a1", "r1", [("c1", "f", "{}")]), result("x", "c1"), user("q2")]
    tools = [tool("f", "F", {}, [])]
    ids = special_ids(encode_messages("deepseek_v4", messages, thinking=True, tools=tools))
    head, calls = ids[: ids.index(128803)], ids[ids.index(128804) :]
    assert head[0] == 0 and set(head[1:]) == {128821, 128822, 128825}, "the tools' description shows markup and thinking"
    assert calls[:2] == [128804, 128821] and calls[2] == 128822 and calls.count(128825) == 4 and calls[-2:] == [128804, 128821]


def byte_tokenizer(path):
    """A tokenizer of single bytes, byte b being 3 + b, that has the special tokens at their recorded ids."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocab = {chr(b): 3 + b for b in printable} | {chr(256 + i): 3 + b for i, b in enumerate(others)} | SPECIAL_IDS
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer.add_special_tokens(list(SPECIAL_IDS))
    tokenizer.save(str(path))


@pytest.mark.parametrize("family", ["v4", "v41", "v32"])
def test_ac_66_a_chat_reaches_the_model_as_the_text_s_own_tokens(family, tmp_path):
    """One special token is one id, everything else its bytes; a tokenizer that adds a token of its own in front is kept
    from it. (The official tokenizers are not at hand, so ordinary text is compared as bytes.)"""
    shutil.copy(GOLDEN / family / "checkpoint" / "config.json", tmp_path)
    byte_tokenizer(tmp_path / "tokenizer.json")
    message = "Grüße\n  <b>你好</b> <think"
    text = encode_messages("deepseek_" + family, [user(message)], thinking=True)
    pieces = re.split("(" + "|".join(map(re.escape, SPECIAL_IDS)) + ")", text)
    expected = [i for p in pieces for i in ([SPECIAL_IDS[p]] if p in SPECIAL_IDS else [3 + b for b in p.encode()])]
    ids = _encode_chat(tmp_path, message, thinking=True)
    assert ids == expected and ids.count(0) == 1 and ids[0] == 0
    assert ids[-2:] == [128804, 128821] and Tokenizer.from_file(str(tmp_path / "tokenizer.json")).decode(
        ids, skip_special_tokens=False
    ) == text


# A later encoding/test_encoding.py of DeepSeek-V4.1-Flash (revision dba1be0a): tools in namespaces.
LOOKUP_OUTPUT = (
    "  reason  </think>summary\n\n"
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="search::lookup">\n'
    '<｜DSML｜ parameter name="query" string="true">value</｜DSML｜ parameter>\n'
    '<｜DSML｜ parameter name="limit" string="false">2</｜DSML｜ parameter>\n'
    f"</｜DSML｜ invoke>\n</｜DSML｜ calls>{EOS}"
)


@pytest.mark.parametrize("place", ["entry", "function", "name"])
def test_v41_namespaces(place):
    function = {"name": "lookup", "arguments": '{"query": "value", "limit": 2}'}
    entry = {"type": "function", "function": function}
    schema = {"type": "function", "function": {"name": "lookup", "description": "Look up a value"}}
    space = {"name": "search", "description": "Search tools."}
    if place == "name":
        function["name"] = schema["function"]["name"] = "search::lookup"
    else:
        (entry if place == "entry" else function)["namespace"] = "search"
        (schema if place == "entry" else schema["function"])["namespace"] = space
    messages = [user("question"), {"role": "assistant", "content": "summary", "reasoning_content": "  reason  "}]
    messages[1]["tool_calls"] = [entry]
    prompt = encode_messages("deepseek_v41", messages, thinking=True, tools=[schema])
    assert prompt.endswith(f"{ASSISTANT}<think>{LOOKUP_OUTPUT}")
    description = "Look up a value" if place == "name" else "Search tools.\\nLook up a value"
    assert f'\n{{"name": "search::lookup", "description": "{description}"}}\n' in prompt

    parsed = parse_message("deepseek_v41", LOOKUP_OUTPUT, thinking=True)
    assert parsed["reasoning_content"] == "  reason  "
    assert parsed["content"] == "summary"
    assert parsed["tool_calls"] == [
        {
            "type": "function",
            "namespace": "search",
            "function": {"name": "lookup", "arguments": '{"query": "value", "limit": 2}'},
        }
    ]
    again = encode_messages("deepseek_v41", [messages[0], parsed], thinking=True)
    assert again.endswith(f"{ASSISTANT}<think>{LOOKUP_OUTPUT}")


@pytest.mark.parametrize(
    ("name", "namespace", "error"),
    [
        ("search::lookup", "files", "in namespace 'search' by its name and in 'files'"),
        ("search::nested::lookup", None, "may contain '::'"),
        ("lookup", "search::nested", "may contain '::'"),
    ],
)
def test_v41_refuses_ambiguous_namespaces(name, namespace, error):
    schema = {"type": "function", "namespace": namespace, "function": {"name": name}}
    with pytest.raises(ValueError, match=error):
        encode_messages("deepseek_v41", [user("question")], thinking=False, tools=[schema])


# ---------------------------------------------------------------- V4


# vllm-project/vllm, tests/tokenizers_/fixtures/deepseek_v4/test_input_2.json; tests/tokenizers_/test_deepseek_v4.py.
# DeepSeek-V4-Flash, encoding/README.md, for the first prompt.
def test_ac_66_v4_plain_and_thinking():
    question = [system("You are a helpful assistant."), user("What is 2+2?")]
    assert encode_messages("deepseek_v4", question, thinking=True) == (
        f"{BOS}You are a helpful assistant.{USER}What is 2+2?{ASSISTANT}<think>"
    )
    messages = [
        system("You are a helpful assistant."),
        user("Hello"),
        assistant("Hi there! How can I help you?", "The user said hello, I should greet back."),
        user("What is the capital of France?"),
        assistant("The capital of France is Paris.", "The user asks about the capital of France. It is Paris."),
    ]
    assert encode_messages("deepseek_v4", messages, thinking=True) == (
        f"{BOS}You are a helpful assistant.{USER}Hello{ASSISTANT}</think>Hi there! How can I help you?{EOS}"
        f"{USER}What is the capital of France?{ASSISTANT}<think>The user asks about the capital of France. It is Paris."
        f"</think>The capital of France is Paris.{EOS}"
    )
    assert encode_messages("deepseek_v4", [user("Hello")], thinking=False) == f"{BOS}{USER}Hello{ASSISTANT}</think>"


# Preview: encoding/encoding_dsv4.py of DeepSeek-V4-Flash and -Pro. 0731: that of DeepSeek-V4-Flash-0731, as vLLM's
# test_deepseek_v4.py and local-inference-lab/vllm issue 220 show its prompts (579 characters for max and "test").
ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose "
    "the problem into its most fundamental components, trace every causal chain to its root, and resolve the "
    "underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)


@pytest.mark.parametrize(
    ("release", "effort", "prefix"),
    [
        (None, None, ""),
        ("preview", None, ""),
        ("preview", "high", ""),
        ("preview", "max", ABSOLUTE),
        ("0731", None, ""),
        ("0731", "low", ""),
        ("0731", "high", ABSOLUTE),
        ("0731", "max", BEYOND),
    ],
)
def test_ac_66_v4_effort_by_release(release, effort, prefix):
    options = {"release": release, "effort": effort}
    prompt = encode_messages("deepseek_v4", [user("test")], thinking=True, **options)
    assert prompt == f"{BOS}{prefix}{USER}test{ASSISTANT}<think>"
    assert prefix != BEYOND or len(prompt) == 579
    plain = encode_messages("deepseek_v4", [user("test")], thinking=False, **options)
    assert plain == f"{BOS}{USER}test{ASSISTANT}</think>"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"effort": "max"}, "depends on the release. Give release='preview'"),
        ({"effort": "low", "release": "preview"}, "'preview' of deepseek_v4 has high, max"),
        ({"effort": 75, "release": "0731"}, "'0731' of deepseek_v4 has low, high, max"),
        ({"release": "v2"}, "allowed: preview, 0731"),
    ],
)
def test_v4_refuses_other_efforts(options, error):
    with pytest.raises(ValueError, match=error):
        encode_messages("deepseek_v4", [user("test")], thinking=True, **options)


# ---------------------------------------------------------------- V3.2


# InternLM/lmdeploy, tests/test_lmdeploy/test_deepseek_v32_encoding.py, for the plain prompts. The developer form is
# that of ai-dynamo/dynamo, lib/llm/tests/data/deepseek-v3.2/test_output_search_wo_date.txt.
def test_ac_66_v32_plain_thinking_and_developer():
    hello = [user("Hello")]
    assert encode_messages("deepseek_v32", hello, thinking=False) == f"{BOS}{USER}Hello{ASSISTANT}</think>"
    assert encode_messages("deepseek_v32", hello, thinking=True) == f"{BOS}{USER}Hello{ASSISTANT}<think>"

    request = [{"role": "developer", "content": "Who was it?"}]
    prompt = encode_messages("deepseek_v32", request, thinking=True, tools=CITIES_TOOLS)
    text = golden("v32_tools.txt")
    tools = text[text.index("\n\n## Tools") : text.index(f"{USER}What's")]
    assert prompt == f"{BOS}{USER}{tools}\n\n# The user's message is: Who was it?{ASSISTANT}<think>"


def test_v32_refuses_what_its_format_cannot_say():
    question, answer = CITIES[1], CITIES[4]
    with pytest.raises(ValueError, match="no effort setting"):
        encode_messages("deepseek_v32", [question], thinking=True, effort="max")
    with pytest.raises(ValueError, match="neither"):
        encode_messages("deepseek_v32", [question, assistant("hi")], thinking=True)
    with pytest.raises(ValueError, match="tool result 1 of an assistant message with 2 tool calls"):
        encode_messages("deepseek_v32", [question, answer, CITIES[5]], thinking=True)
    with pytest.raises(ValueError, match="tool result 1 of an assistant message with 0 tool calls"):
        encode_messages("deepseek_v32", [question, CITIES[5]], thinking=True)
    broken = assistant(None, "r", [(None, "get_weather", '{"location"')])
    with pytest.raises(ValueError, match="arguments of tool 'get_weather'"):
        encode_messages("deepseek_v32", [question, broken], thinking=True)


# ---------------------------------------------------------------- choice of the encoder, wrong messages


@pytest.mark.parametrize("model_type", ["deepseek_v41_text", "deepseek_v4.1", "deepseek_v4_flash", "deepseek_v3", ""])
def test_ac_66_encoder_is_chosen_by_exact_model_type(model_type):
    allowed = "deepseek_v32, deepseek_v4, deepseek_v41"
    with pytest.raises(ValueError, match=f"model_type '{model_type}' has no chat encoding. Allowed: {allowed}"):
        encode_messages(model_type, [user("hi")], thinking=False)
    with pytest.raises(ValueError, match=f"model_type '{model_type}' has no chat encoding. Allowed: {allowed}"):
        parse_message(model_type, "hi", thinking=False)


@pytest.mark.parametrize(
    ("model_type", "messages", "error"),
    [
        ("deepseek_v41", [], "no messages"),
        ("deepseek_v41", [{"role": "developer", "content": "x"}], "role 'developer'; deepseek_v41 has system"),
        ("deepseek_v32", [{"role": "latest_reminder", "content": "x"}], "deepseek_v32 has system, user"),
        ("deepseek_v41", [user("hi", name="Ann")], "fields name do not reach the prompt"),
        ("deepseek_v4", [{"role": "assistant", "reasoning": "why"}], "fields reasoning do not reach the prompt"),
        ("deepseek_v32", [assistant("hi", wo_eos=True)], "fields wo_eos"),
        ("deepseek_v4", [user([{"type": "image_url"}])], "type 'image_url'; deepseek_v4 takes text"),
        ("deepseek_v41", [system([{"type": "image_url"}])], "deepseek_v41 takes text"),
        ("deepseek_v41", [user([{"type": "input_audio"}])], "takes text, image, image_url"),
        ("deepseek_v32", [user([{"type": "text", "text": "x"}])], "is list, not text"),
        ("deepseek_v4", [user("a"), user("b", task="query")], "joins the one before"),
        ("deepseek_v4", [user("a", task="poem")], "task 'poem'; allowed: action"),
        ("deepseek_v4", [{"role": "assistant", "tool_calls": [{"name": "f"}]}], "a tool call is {"),
        ("deepseek_v41", [user("hi"), {"role": "tool", "content": 3}], "content of a tool message is int"),
        ("deepseek_v32", [user("hi"), assistant("x", 3)], "reasoning_content is int, not text"),
    ],
)
def test_wrong_messages_are_refused(model_type, messages, error):
    with pytest.raises(ValueError, match=error):
        encode_messages(model_type, messages, thinking=False)


def test_release_belongs_to_v4():
    with pytest.raises(ValueError, match="only deepseek_v4"):
        encode_messages("deepseek_v41", [user("hi")], thinking=False, release="0731")


# ---------------------------------------------------------------- completions back to messages


def without_ids(message):
    calls = [{key: value for key, value in entry.items() if key != "id"} for entry in message.get("tool_calls", [])]
    return message | {"content": message["content"] or "", "tool_calls": calls}


@pytest.mark.parametrize("model_type", TOOL_CASES)
def test_ac_66_round_trip_of_the_golden_answers(model_type):
    """Answers with reasoning, cut out of the golden prompts, give the messages that they were made from."""
    messages, _, name = TOOL_CASES[model_type]
    expected = [without_ids(message) for message in messages if message["role"] == "assistant"]
    answers = [piece[: piece.index(EOS)] for piece in golden(name).split("<think>")[1:] if EOS in piece]
    answers = answers[-2:]  # V3.2 drops the reasoning of earlier turns
    for answer, message in zip(answers, expected[-2:], strict=True):
        for text in (answer, answer + EOS):
            assert parse_message(model_type, text, thinking=True) == message


@pytest.mark.parametrize("model_type", TOOL_CASES)
@pytest.mark.parametrize("thinking", [True, False])
def test_ac_66_round_trip(model_type, thinking):
    arguments = {"s": 'a "b"\n<c> ｜', "n": -1.5, "none": None, "list": [1, {"k": "é"}], "empty": ""}
    calls = [("", "no_arguments", "{}"), ("", "all_kinds", arguments)]
    question, message = user("q"), assistant("text\n\nmore", "r\n\n1" if thinking else "", calls)
    prompt = encode_messages(model_type, [question], thinking=thinking)
    whole = encode_messages(model_type, [question, message], thinking=thinking)
    assert whole.startswith(prompt)
    parsed = parse_message(model_type, whole.removeprefix(prompt), thinking=thinking)
    assert (parsed["reasoning_content"], parsed["content"]) == (message["reasoning_content"], message["content"])
    functions = [entry["function"] for entry in parsed["tool_calls"]]
    assert [function["name"] for function in functions] == ["no_arguments", "all_kinds"]
    assert [json.loads(function["arguments"]) for function in functions] == [{}, arguments]
    assert encode_messages(model_type, [question, parsed], thinking=thinking) == whole


GOOD = (
    'r</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
    '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("</think>", "", "does not end with </think>"),
        ("r</think>", "r<think></think>", "reasoning_content contains <think>"),
        (" calls", "tool_calls", "content contains ｜DSML｜"),
        ("<｜DSML｜ invoke", "<｜DSML｜invoke", "malformed tool calls at '<｜DSML｜invoke"),
        ("</｜DSML｜ parameter>\n", "</｜DSML｜ parameter>", "expected <｜DSML｜ parameter name="),
        ("</｜DSML｜ calls>", "", "malformed tool calls at ''"),
        ("</｜DSML｜ calls>", "</｜DSML｜ calls>more", "expected the end of the message"),
        (">1<", ">one<", "parameter 'a' says string=\"false\" and is no JSON"),
        ("r</think>", f"r</think>x{EOS}", "text after"),
    ],
)
def test_malformed_completions_are_refused(old, new, error):
    assert parse_message("deepseek_v41", GOOD, thinking=True)["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    with pytest.raises(ValueError, match=error):
        parse_message("deepseek_v41", GOOD.replace(old, new), thinking=True)


def test_a_parameter_given_twice_is_refused():
    line = '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n'
    with pytest.raises(ValueError, match="parameter 'a' is given twice"):
        parse_message("deepseek_v41", GOOD.replace(line, line * 2), thinking=True)
