"""The Anthropic SDK: messages, streams, tools and errors."""

import anthropic
import server

client = anthropic.Anthropic(base_url=server.URL, api_key=server.KEY, max_retries=0)
# The SDK's own signature has no temperature.
greedy = {"extra_body": {"temperature": 0}}
expected = server.chat_text(40)
answer = client.messages.create(model=server.MODEL, messages=server.MESSAGES, max_tokens=40, **greedy)
assert answer.content[0].text == expected and answer.usage.output_tokens > 0
with client.messages.stream(model=server.MODEL, messages=server.MESSAGES, max_tokens=40, **greedy) as stream:
    assert "".join(stream.text_stream) == expected
tool = {"name": "get_weather", "description": "Get a forecast.", "input_schema": server.PARAMETERS}
for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
    call = client.messages.create(
        model=server.MODEL, messages=server.MESSAGES, tools=[tool], tool_choice=choice, max_tokens=200
    )
    assert call.stop_reason == "tool_use"
    used = next(block for block in call.content if block.type == "tool_use")
    assert server.is_forecast(used.input)
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
    again = client.messages.create(
        model=server.MODEL,
        messages=[
            *server.MESSAGES,
            {"role": "assistant", "content": call.content},
            {"role": "user", "content": [result]},
        ],
        tools=[tool],
        tool_choice={"type": "none"},
        max_tokens=8,
    )
    assert again.stop_reason in {"end_turn", "max_tokens"}
assert client.messages.count_tokens(model=server.MODEL, messages=server.MESSAGES).input_tokens > 0
try:
    client.messages.create(model="no-such-model", messages=server.MESSAGES, max_tokens=8)
except anthropic.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was served")
