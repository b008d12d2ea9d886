"""openai_client.py PORT: OpenAI's own Python client against a server with a real model."""
import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"http://127.0.0.1:{sys.argv[1]}/v1", api_key="none",
                       max_retries=0)
SAY = [{"role": "user", "content": "What is the capital of France?"}]
TOOLS = [{"type": "function", "function": {
    "name": "get_time", "description": "the time in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}},
                   "required": ["city"]}}}]

# Models.
models = list(client.models.list())
assert len(models) == 1 and client.models.retrieve(models[0].id).id == models[0].id, models
name = models[0].id

# Chat, whole and as a stream.
a = client.chat.completions.create(model=name, messages=SAY, temperature=0, max_tokens=40, seed=1)
text = a.choices[0].message.content
assert "Paris" in text and a.choices[0].finish_reason in ("stop", "length"), a
assert a.usage.total_tokens == a.usage.prompt_tokens + a.usage.completion_tokens
parts = list(client.chat.completions.create(
    model=name, messages=SAY, temperature=0, max_tokens=40, stream=True,
    stream_options={"include_usage": True}))
assert parts[0].choices[0].delta.role == "assistant"
assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == text
assert parts[-1].usage.completion_tokens == a.usage.completion_tokens
with client.chat.completions.stream(model=name, messages=SAY, temperature=0,
                                    max_tokens=40) as stream:
    for _ in stream:
        pass
    assert stream.get_final_completion().choices[0].message.content == text
a = client.chat.completions.create(model=name, messages=SAY, temperature=0, max_tokens=4,
                                   logprobs=True, top_logprobs=2, n=2)
assert len(a.choices) == 2 and len(a.choices[0].logprobs.content[0].top_logprobs) == 2, a

# Completions.
c = client.completions.create(model=name, prompt="The capital of France is", temperature=0,
                              max_tokens=5, logprobs=2, echo=True)
assert "Paris" in c.choices[0].text and c.choices[0].logprobs.token_logprobs[0] is None, c
parts = list(client.completions.create(model=name, prompt="The capital of France is",
                                       temperature=0, max_tokens=5, stream=True))
assert "Paris" in "".join(p.choices[0].text for p in parts)

# Tools: the whole conversation with a call and its result; what the model does with them is
# its own affair, but the client must understand it.
a = client.chat.completions.create(model=name, messages=SAY, tools=TOOLS, max_tokens=40,
                                   temperature=0)
assert a.choices[0].finish_reason in ("stop", "length", "tool_calls"), a
a = client.chat.completions.create(model=name, messages=SAY, tools=TOOLS, max_tokens=40,
                                   temperature=0, tool_choice="required")
call = a.choices[0].message.tool_calls[0].function
assert call.name == "get_time" and isinstance(json.loads(call.arguments)["city"], str), a
a = client.chat.completions.create(model=name, temperature=0, max_tokens=8, tools=TOOLS, messages=SAY + [
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "abcdefghi", "type": "function",
         "function": {"name": "get_time", "arguments": json.dumps({"city": "Paris"})}}]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "12:00"}])
assert a.choices[0].message, a

# Answers as objects.
class Place(BaseModel):
    kind: Literal["city", "river"]
    in_europe: bool


p = client.chat.completions.parse(model=name, messages=SAY, response_format=Place,
                                  temperature=0, max_tokens=100)
assert isinstance(p.choices[0].message.parsed, Place), p

# Errors are the client's own exceptions.
for wrong, kind in (({"messages": []}, openai.BadRequestError),
                    ({"messages": SAY, "tool_choice": "required"}, openai.BadRequestError),
                    ({"messages": SAY, "extra_body": {"frob": 1}}, openai.BadRequestError)):
    try:
        client.chat.completions.create(model=name, **wrong)
    except kind as e:
        assert e.body["message"] and e.body["code"], e.body
    else:
        raise AssertionError(wrong)
try:
    client.models.retrieve("no-such-model")
except openai.NotFoundError:
    pass
else:
    raise AssertionError("a model that is not there")
print("all checks passed")
