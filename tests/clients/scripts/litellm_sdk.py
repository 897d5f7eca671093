"""litellm: completion, stream, tools, and its own exceptions for our errors."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import server

expected = server.chat_text(40)
for provider in ("openai", "hosted_vllm"):
    given = {"model": f"{provider}/{server.MODEL}", "api_base": server.BASE_URL, "api_key": server.KEY}
    answer = litellm.completion(messages=server.MESSAGES, max_tokens=40, temperature=0, **given)
    assert answer.choices[0].message.content == expected
    chunks = litellm.completion(messages=server.MESSAGES, max_tokens=40, temperature=0, stream=True, **given)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    call = litellm.completion(
        messages=server.MESSAGES, tools=[server.TOOL], tool_choice="required", parallel_tool_calls=False, **given
    )
    assert server.is_forecast(json.loads(call.choices[0].message.tool_calls[0].function.arguments))
    try:
        litellm.completion(messages=[{"role": "user", "content": server.TOO_LONG}], **given)
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("a prompt that is too long was taken")
