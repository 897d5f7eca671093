"""llama-index: completion, chat and stream by its OpenAI-like model, and a forced tool call."""

import server
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=server.MODEL,
    api_base=server.BASE_URL,
    api_key=server.KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
    max_tokens=40,
    temperature=0,
)
expected = server.chat_text(40)
question = [ChatMessage(role="user", content=server.QUESTION)]
assert model.chat(question).message.content == expected
assert "".join(part.delta or "" for part in model.stream_chat(question)) == expected
assert model.complete(server.QUESTION).text == expected


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


tool = FunctionTool.from_defaults(fn=add)
calling = model.model_copy(update={"max_tokens": 200})
answer = calling.chat_with_tools([tool], user_msg=server.QUESTION, tool_required=True)
(call, *_) = calling.get_tool_calls_from_response(answer)
assert call.tool_name == "add" and tool.fn(**call.tool_kwargs) == call.tool_kwargs["a"] + call.tool_kwargs["b"]
