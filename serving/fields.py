# Copyright 2026 The attnres authors. SPDX-License-Identifier: Apache-2.0
"""What a request may ask of the server, checked before transformers' server sees it."""

import functools
import inspect
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator


# Options of a template that a request may set although the tokenizer's method has them as parameters
TEMPLATE_OPTIONS = ("add_generation_prompt", "continue_final_message", "documents")
MOST_NESTED = 64
Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]


@dataclass(frozen=True)
class Limits:
    """Of one request, in tokens.

    Args:
        prompt_tokens: at most so many in the prompt; `None` is the context of the model.
        new_tokens: at most so many in the answer.
    """

    prompt_tokens: int | None = None
    new_tokens: int = 4096


class Fields(BaseModel):
    """Names that are not here are transformers' to know or to refuse."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Part(Fields):
    type: Name
    text: str | None = None

    @model_validator(mode="after")
    def is_whole(self):
        if self.type in ("text", "input_text", "output_text") and self.text is None:
            raise ValueError(f"a part of type `{self.type}` needs `text`")
        for name in ("image_url", "video_url", "audio_url"):
            address = (self.model_extra or {}).get(name)
            address = address.get("url") if isinstance(address, dict) else address
            if address is not None and not str(address).startswith(("http://", "https://", "data:")):
                raise ValueError(f"`{name}` is an address that starts with http://, https:// or data:, not a file")
        return self


class Function(Fields):
    name: Name
    arguments: str | dict


class ToolCall(Fields):
    function: Function


class Message(Fields):
    role: Name
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] = []


class Sampling(BaseModel):
    """The part of a `GenerationConfig` that is the client's business: how tokens are drawn."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0)] | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    max_new_tokens: Positive | None = None


class Request(Fields):
    model: Name | None = None
    stream: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    generation_config: str | None = None

    def new_tokens(self) -> tuple[str, int | None]:
        """The field that says how long the answer may be, and what it says."""
        return "max_tokens", getattr(self, "max_tokens", None)


class Completion(Request):
    max_tokens: Positive | None = None
    frequency_penalty: Annotated[float, Field(gt=-1, le=2)] | None = None
    stop: Name | Annotated[list[Name], Field(max_length=16)] | None = None
    prompt: str = ""
    suffix: str | None = None


class Chat(Request):
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    frequency_penalty: Annotated[float, Field(gt=-1, le=2)] | None = None
    stop: Name | Annotated[list[Name], Field(max_length=16)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], float] | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[dict] | None = None
    chat_template: Literal[None] = None
    chat_template_kwargs: dict[str, Any] = {}

    def new_tokens(self):
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens


class Response(Request):
    max_output_tokens: Positive | None = None
    input: Annotated[str, Field(min_length=1)] | Annotated[list[dict], Field(min_length=1)]
    instructions: str | None = None
    tools: list[dict] | None = None
    chat_template: Literal[None] = None
    chat_template_kwargs: dict[str, Any] | None = None

    def new_tokens(self):
        return "max_output_tokens", self.max_output_tokens


ENDPOINTS: dict[str, type[Request]] = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/responses": Response,
}


@functools.cache
def template_parameters() -> frozenset[str]:
    """What `apply_chat_template` takes for itself: the template, whether to pad, to which length, and so on."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    names = set(TEMPLATE_OPTIONS)
    methods = (PreTrainedTokenizerBase.apply_chat_template, ProcessorMixin.apply_chat_template)
    return frozenset(name for method in methods for name in inspect.signature(method).parameters) - names


def problem_of_template(options: dict[str, Any] | None) -> str | None:
    for name, value in (options or {}).items():
        if name == "chat_template":
            return "`chat_template_kwargs.chat_template`: templates are the checkpoint's, not the client's."
        if name in template_parameters():
            return f"`chat_template_kwargs.{name}`: not an option of the template."
        if name != "documents" and not isinstance(value, (bool, int, float, str, type(None))):
            return f"`chat_template_kwargs.{name}`: only texts, numbers, true, false and null can be given."
    return None


def depth(value: Any) -> int:
    """How deep lists and objects are nested, without recursion."""
    level, found = [value], 0
    while level:
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list))]
        level = [one for parts in inner for one in parts]
        found += bool(inner)
    return found


def sentence(error: ValidationError) -> str:
    # Of a union, the one that went farthest is meant. Its branches are in the place too, though nobody wrote them
    found = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
    place = ".".join(
        str(part) for part in found["loc"] if isinstance(part, int) or part.isidentifier() and part != "str"
    )
    message = found["msg"].removeprefix("Value error, ")
    if place == "chat_template":
        return "`chat_template`: templates are the checkpoint's, not the client's."
    if found["type"] == "missing":
        return f"`{place}` is missing."
    return f"`{place}`: {message[0].lower()}{message[1:]}." if place else f"{message}."


def problem_of(path: str, body: bytes, limits: Limits) -> str | None:
    """What is wrong with a request, in one sentence. Broken JSON is transformers' to refuse."""
    try:
        fields = json.loads(body)
        if depth(fields) > MOST_NESTED:
            raise RecursionError
    except RecursionError:
        return f"The body is nested deeper than {MOST_NESTED} levels."
    except ValueError:
        return None
    if path not in ENDPOINTS or not isinstance(fields, dict):
        return None
    try:
        request = ENDPOINTS[path].model_validate(fields)
        asked = [request.new_tokens()]
        if request.generation_config is not None:
            sampling = Sampling.model_validate_json(request.generation_config)
            asked += [(f"generation_config.{name}", getattr(sampling, name)) for name in sampling.model_fields_set]
    except ValidationError as error:
        return sentence(error)
    for name, number in asked:
        if name.endswith("_tokens") and number is not None and number > limits.new_tokens:
            return f"`{name}` is {number}, and this server gives at most {limits.new_tokens} new tokens."
    return problem_of_template(getattr(request, "chat_template_kwargs", None))
